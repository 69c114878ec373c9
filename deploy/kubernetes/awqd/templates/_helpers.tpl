{{/* Names, labels, and the checks that the schema cannot make. */}}
{{- define "awqd.name" -}}
{{- if contains "awqd" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-awqd" (.Release.Name | trunc 45 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "awqd.selector" -}}
app.kubernetes.io/name: awqd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "awqd.labels" -}}
{{ include "awqd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "awqd.check" -}}
{{- if and .Values.tokensSecret (not .Values.tls.secret) }}{{ fail "tokensSecret: got one without tls.secret, expected both: a token in plaintext can be read on its way" }}{{ end }}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secret) }}{{ fail "tls.clientCertificates: got true without tls.secret, expected both" }}{{ end }}
{{- if and (eq .Values.models.source "hub") (not .Values.models.hub.repositories) }}{{ fail "models.hub.repositories: got none, expected ORG/NAME with models.source hub" }}{{ end }}
{{- if and (eq .Values.models.source "pvc") (not .Values.models.claim) }}{{ fail "models.claim: got none, expected the name of a claim with models.source pvc" }}{{ end }}
{{- if lt (int .Values.autoscaling.maxReplicas) (int .Values.autoscaling.minReplicas) }}{{ fail "autoscaling.maxReplicas: got less than minReplicas" }}{{ end }}
{{- if and .Values.autoscaling.enabled (not .Values.metrics.enabled) }}{{ fail "autoscaling.enabled: got true without metrics.enabled, expected both" }}{{ end }}
{{- end }}

{{/* With TLS the kubelet cannot ask by gRPC, so awqctl asks in the pod, on a socket that stays plain. */}}
{{- define "awqd.probe" -}}
{{- if .Values.tls.secret -}}
exec: {command: [/opt/awqd/bin/awqctl, --address, "unix:/run/awqd/awqd.sock", healthcheck]}
timeoutSeconds: 5
{{- else -}}
grpc: {port: 8001}
timeoutSeconds: 5
{{- end }}
{{- end }}
