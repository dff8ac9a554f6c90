{{/* Labels that choose the pods of a set. Takes root and role, as all that follows does. */}}
{{- define "vlmserve.selector" -}}
app.kubernetes.io/name: vlmserve
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "vlmserve.labels" -}}
{{ include "vlmserve.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* The values of a set: the defaults, with its own in place of theirs. (Sprig's mergeOverwrite would pass over zeros.) */}}
{{- define "vlmserve.set" -}}
{{- $set := deepCopy .root.Values.defaults }}
{{- range $name, $value := index .root.Values .role }}
{{- $_ := set $set $name $value }}
{{- end }}
{{- toYaml $set }}
{{- end }}

{{/* The addresses of all pods that a set may have, at a port; "" without the set. Others pass over a missing pod. */}}
{{- define "vlmserve.urls" -}}
{{- $set := include "vlmserve.set" . | fromYaml }}
{{- $name := printf "%s-%s" .root.Release.Name .role }}
{{- $urls := list }}
{{- range gt (int $set.replicas) 0 | ternary (max $set.replicas $set.maxReplicas) 0 | int | until }}
{{- $urls = append $urls (printf "tcp://%s-%d.%s:%v" $name . $name $.port) }}
{{- end }}
{{- join "," $urls }}
{{- end }}

{{/* The names that a server without API keys answers to, besides addresses. */}}
{{- define "vlmserve.hosts" -}}
{{- $inside := printf "%s.%s" .root.Release.Name .root.Release.Namespace }}
{{- $names := list .root.Release.Name $inside (printf "%s.svc" $inside) (printf "%s.svc.cluster.local" $inside) }}
{{- concat $names .root.Values.hosts | join "," }}
{{- end }}

{{/* The keys that a pod needs, as a list of variables. */}}
{{- define "vlmserve.keys" -}}
{{- $keys := .root.Values.keys }}
{{- $variables := dict "VLMSERVE_API_KEY" $keys.api "VLMSERVE_ADMIN_API_KEY" $keys.admin }}
{{- if ne .role "router" }}
{{- $variables = merge $variables (dict "VLMSERVE_PEER_KEY" $keys.peer "HF_TOKEN" $keys.hub) }}
{{- else if not $keys.clients }}
{{- $variables = merge $variables (dict "VLMSERVE_UPSTREAM_API_KEY" $keys.api) }}
{{- end }}
{{- range $variable, $entry := $variables }}
{{- if $entry }}
- name: {{ $variable }}
  valueFrom:
    secretKeyRef: {name: {{ $keys.secret }}, key: {{ $entry }}}
{{- end }}
{{- end }}
{{- end }}

{{/* How a pod runs and ends. */}}
{{- define "vlmserve.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false  # a Service called vlmserve would make variables that look like settings
# More than the two times: embeddings and prefixes on their way to the disk get 5 s each, and processes need some to end.
terminationGracePeriodSeconds: {{ add .root.Values.preStopS .root.Values.shutdownTimeoutS 20 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* What all containers have. */}}
{{- define "vlmserve.container" -}}
name: vlmserve
imagePullPolicy: {{ .root.Values.imagePullPolicy }}
ports:
  - {name: http, containerPort: 8000}
  {{- with .peerPort }}
  - {name: peers, containerPort: {{ . }}}
  {{- end }}
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
lifecycle:
  preStop:
    exec: {command: [sleep, {{ quote .root.Values.preStopS }}]}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* One pod at a time is taken away, for the maintenance of nodes and the like. */}}
{{- define "vlmserve.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .root.Release.Name }}-{{ .role }}
  labels: {{- include "vlmserve.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "vlmserve.selector" . | nindent 6 }}
{{- end }}
