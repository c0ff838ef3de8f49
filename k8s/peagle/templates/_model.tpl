{{- /* Which model the server is told to load, and the configuration file it reads. */ -}}

{{- /* Empty: the default model. */ -}}
{{- define "peagle.model" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "pvc" -}}
{{ printf "%s/%s" (trimSuffix "/" $model.mountPath) (trimPrefix "/" $model.name) | trimSuffix "/" }}
{{- else if ne $model.source "default" -}}
{{ $model.name }}
{{- end -}}
{{- end -}}

{{- define "peagle.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $_ := set $config "shutdown_timeout_s" .Values.drain.timeoutSeconds -}}
{{- with include "peagle.model" . -}}
{{- $_ := set $config "model" . -}}
{{- end -}}
{{- with .Values.model.servedNames -}}
{{- $_ := set $config "served_model_name" . -}}
{{- end -}}
{{- if .Values.auth.existingSecret -}}
{{- $_ := set $config "api_key_file" "/etc/peagle-keys/api-keys" -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}
