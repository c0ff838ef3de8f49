{{- /* The server's pod: placement, container, volumes. */ -}}

{{- define "peagle.podSpec" -}}
serviceAccountName: {{ include "peagle.serviceAccountName" . }}
automountServiceAccountToken: false
# Else a Service of our name would put variables with our prefix into the process.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "peagle.gracePeriodSeconds" . }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- include "peagle.placement" . }}
{{- with .Values.initContainers }}
initContainers:
  {{- tpl (toYaml .) $ | nindent 2 }}
{{- end }}
containers:
  - name: peagle
    {{- include "peagle.container" . | nindent 4 }}
  {{- with .Values.extraContainers }}
  {{- tpl (toYaml .) $ | nindent 2 }}
  {{- end }}
volumes:
  {{- include "peagle.volumes" . | nindent 2 }}
{{- end -}}

{{- define "peagle.placement" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $.Values $key }}
{{ $key }}:
  {{- tpl (toYaml .) $ | nindent 2 }}
{{- end }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "peagle.container" -}}
image: {{ include "peagle.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - serve
  - --config
  - /etc/peagle/config.yaml
  {{- range .Values.extraArgs }}
  - {{ tpl . $ | quote }}
  {{- end }}
env:
  {{- include "peagle.env" . | nindent 2 }}
{{- with .Values.extraEnvFrom }}
envFrom:
  {{- tpl (toYaml .) $ | nindent 2 }}
{{- end }}
ports:
  - name: http
    containerPort: {{ .Values.containerPort }}
    protocol: TCP
startupProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: {{ .Values.probes.startup.periodSeconds }}
  timeoutSeconds: {{ .Values.probes.startup.timeoutSeconds }}
  failureThreshold: {{ include "peagle.startupFailureThreshold" . }}
readinessProbe:
  httpGet: {path: /ready, port: http}
  {{- toYaml .Values.probes.readiness | nindent 2 }}
{{- with .Values.probes.liveness }}
livenessProbe:
  httpGet: {path: /health, port: http}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.drain.preStopSeconds }}
lifecycle:
  preStop:
    {{- include "peagle.preStop" . | nindent 4 }}
{{- end }}
resources:
  {{- include "peagle.resources" . | nindent 2 }}
securityContext:
  {{- toYaml .Values.containerSecurityContext | nindent 2 }}
volumeMounts:
  {{- include "peagle.volumeMounts" . | nindent 2 }}
{{- end -}}

{{- define "peagle.env" -}}
- name: PEAGLE_PORT
  value: {{ .Values.containerPort | quote }}
{{- if ne .Values.model.source "image" }}
- name: PEAGLE_CACHE
  value: /data/peagle
{{- end }}
- name: HF_HOME
  value: /data/huggingface
- name: HOME
  value: /tmp
{{- if and .Values.resources.requests (.Values.resources.requests).cpu (not .Values.config.num_threads) }}
- name: PEAGLE_NUM_THREADS
  valueFrom:
    resourceFieldRef: {containerName: peagle, resource: requests.cpu}
{{- end }}
{{- with .Values.model.hubToken }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ tpl .existingSecret $ }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ tpl (toYaml .) $ }}
{{- end }}
{{- end -}}

{{- define "peagle.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if .Values.gpu.enabled -}}
{{- $gpu := dict .Values.gpu.resourceName (.Values.gpu.count | toString) -}}
{{- $_ := set $resources "requests" (merge $gpu ($resources.requests | default dict)) -}}
{{- $_ := set $resources "limits" (merge (deepCopy $gpu) ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "peagle.volumeMounts" -}}
- name: config
  mountPath: /etc/peagle
  readOnly: true
- name: cache
  mountPath: /data
- name: tmp
  mountPath: /tmp
{{- if .Values.auth.existingSecret }}
- name: api-keys
  mountPath: /etc/peagle-keys
  readOnly: true
{{- end }}
{{- if eq .Values.model.source "pvc" }}
- name: models
  mountPath: {{ .Values.model.mountPath }}
  readOnly: true
{{- end }}
{{- if .Values.sharedMemory }}
- name: shared-memory
  mountPath: /dev/shm
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ tpl (toYaml .) $ }}
{{- end }}
{{- end -}}

{{- define "peagle.volumes" -}}
- name: config
  configMap:
    name: {{ include "peagle.fullname" . }}
- name: cache
  {{- if eq .Values.cache.kind "emptyDir" }}
  emptyDir:
    sizeLimit: {{ .Values.cache.size }}
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ include "peagle.cacheClaim" . }}
  {{- end }}
- name: tmp
  emptyDir: {}
{{- with .Values.auth }}
{{- if .existingSecret }}
- name: api-keys
  secret:
    secretName: {{ tpl .existingSecret $ }}
    items: [{key: {{ .key }}, path: api-keys}]
{{- end }}
{{- end }}
{{- if eq .Values.model.source "pvc" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Values.model.claimName }}
    readOnly: true
{{- end }}
{{- with .Values.sharedMemory }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ tpl (toYaml .) $ }}
{{- end }}
{{- end -}}
