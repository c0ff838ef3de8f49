{{- /* What has to agree about starting and stopping: each number is computed in one place from the values. */ -}}

{{- /* Behind the drain timeout the server takes up to 12 s to abort what is left and to stop the engine; 3 s are spare. */ -}}
{{- define "peagle.gracePeriodSeconds" -}}
{{- add .Values.drain.preStopSeconds .Values.drain.timeoutSeconds 15 -}}
{{- end -}}

{{- /* A rollout must not count as failed while a pod may still be loading. */ -}}
{{- define "peagle.progressDeadlineSeconds" -}}
{{- add .Values.probes.startup.budgetSeconds 300 -}}
{{- end -}}

{{- define "peagle.startupFailureThreshold" -}}
{{- $startup := .Values.probes.startup -}}
{{- max 1 (div (add $startup.budgetSeconds $startup.periodSeconds -1) $startup.periodSeconds) -}}
{{- end -}}

{{- /* The smallest number of replicas that there will be. */ -}}
{{- define "peagle.minReplicas" -}}
{{- if eq .Values.autoscaling.kind "none" -}}
{{ .Values.replicas }}
{{- else -}}
{{ .Values.autoscaling.minReplicas }}
{{- end -}}
{{- end -}}

{{- /* Before 1.30 the kubelet cannot sleep by itself. */ -}}
{{- define "peagle.preStop" -}}
{{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version -}}
sleep:
  seconds: {{ .Values.drain.preStopSeconds }}
{{- else -}}
exec:
  command: ["python3", "-c", "import time; time.sleep({{ .Values.drain.preStopSeconds }})"]
{{- end -}}
{{- end -}}
