{{- /* Combinations that a schema cannot judge. Each message says what to change. */ -}}
{{- define "peagle.validate" -}}
{{- $v := .Values -}}
{{- $auto := $v.autoscaling -}}
{{- if and (ne $auto.kind "none") (gt (int $auto.minReplicas) (int $auto.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas (%d) is above autoscaling.maxReplicas (%d)" (int $auto.minReplicas) (int $auto.maxReplicas)) -}}
{{- end -}}
{{- if and (eq (int $auto.minReplicas) 0) (or (ne $auto.kind "keda") (not $auto.keda.query)) -}}
{{- fail "autoscaling.minReplicas 0 needs kind keda and a keda.query that counts requests in front of the pods: a pod that is not there counts none" -}}
{{- end -}}
{{- if and $v.serviceMonitor.enabled $v.podMonitor.enabled -}}
{{- fail "enable serviceMonitor or podMonitor, not both: every request would be counted twice" -}}
{{- end -}}
{{- if and $v.gpu.enabled (eq ($v.config.device | default "auto") "cpu") -}}
{{- fail "gpu.enabled asks for a GPU that config.device: cpu would leave idle; drop one of the two" -}}
{{- end -}}
{{- if and (eq $v.cache.kind "create") (not (has "ReadWriteMany" $v.cache.accessModes)) (or (ne $auto.kind "none") (gt (int $v.replicas) 1)) -}}
{{- fail "several replicas cannot share a cache.kind: create claim without ReadWriteMany; use it in cache.accessModes, or cache.kind: emptyDir" -}}
{{- end -}}
{{- if and (eq $v.cache.kind "create") (not (has "ReadWriteMany" $v.cache.accessModes)) (not $v.strategy.type) -}}
{{- fail "the cache's claim can be mounted on one node at a time, and a rolling update starts the new pod first: set strategy: {type: Recreate}, or ReadWriteMany in cache.accessModes" -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.egress.https) (has $v.model.source (list "default" "hub")) (eq $v.cache.kind "emptyDir") -}}
{{- fail "networkPolicy.egress.https: false keeps the pod from fetching its model; use model.source pvc or image, or a cache that already holds it" -}}
{{- end -}}
{{- end -}}
