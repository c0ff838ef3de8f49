{{- /* What both kinds of monitor scrape alike. The rules, the dashboard and KEDA's query count on these two labels. */ -}}
{{- define "peagle.scrape" -}}
interval: {{ .monitor.interval }}
honorLabels: false
relabelings:
  - {targetLabel: job, replacement: peagle, action: replace}
  - {targetLabel: service, replacement: {{ include "peagle.fullname" .root }}, action: replace}
{{- with .monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
