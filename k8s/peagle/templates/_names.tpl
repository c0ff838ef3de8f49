{{- /* Names and labels. */ -}}

{{- define "peagle.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "peagle.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains (include "peagle.name" .) .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "peagle.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "peagle.selectorLabels" -}}
app.kubernetes.io/name: {{ include "peagle.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "peagle.labels" -}}
{{ include "peagle.commonLabels" . }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "peagle.commonLabels" -}}
app.kubernetes.io/name: {{ include "peagle.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ tpl (toYaml .) $ }}
{{- end }}
{{- end -}}

{{- /* The lines `annotations:` and below, of the common ones and those in `extra`. Takes a dict of root and extra. */ -}}
{{- define "peagle.annotations" -}}
{{- $merged := merge (dict) (.extra | default dict) .root.Values.commonAnnotations -}}
{{- if $merged -}}
annotations:
  {{- tpl (toYaml $merged) .root | nindent 2 }}
{{- end -}}
{{- end -}}

{{- define "peagle.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag) }}
{{- end -}}
{{- end -}}

{{- define "peagle.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "peagle.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "peagle.cacheClaim" -}}
{{- if eq .Values.cache.kind "existing" -}}
{{ .Values.cache.existingClaim }}
{{- else -}}
{{ include "peagle.fullname" . }}-cache
{{- end -}}
{{- end -}}
