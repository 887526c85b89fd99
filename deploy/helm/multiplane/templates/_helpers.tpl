{{- define "multiplane.labels" -}}
app.kubernetes.io/name: multiplane
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "multiplane.selector" -}}
app.kubernetes.io/name: multiplane
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "multiplane.name" -}}
{{ printf "%s-%s" .root.Release.Name .component | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "multiplane.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- end }}

{{/* What every container of ours is held to. */}}
{{- define "multiplane.contained" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Where the bus is, and a member's way in. */}}
{{- define "multiplane.bus" -}}
- {name: MULTIPLANE_NATS, value: {{ .root.Values.nats.url | quote }}}
{{- if index .root.Values.nats.secrets .member }}
- {name: MULTIPLANE_NATS_USER, value: {{ .member | quote }}}
- {name: MULTIPLANE_NATS_PASSWORD_FILE, value: /run/secrets/bus/password}
{{- end }}
{{- if .root.Values.nats.ca }}
- {name: MULTIPLANE_NATS_CA, value: /run/secrets/bus/ca.pem}
{{- end }}
{{- end }}

{{- define "multiplane.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if index .root.Values.nats.secrets .member }}
- {name: bus, mountPath: /run/secrets/bus, readOnly: true}
{{- end }}
{{- end }}

{{- define "multiplane.volumes" -}}
- {name: tmp, emptyDir: {sizeLimit: 64Mi}}
{{- with index .root.Values.nats.secrets .member }}
- {name: bus, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{/* Replicas on different nodes, as far as there are any. */}}
{{- define "multiplane.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "multiplane.selector" . | nindent 6 }}
{{- end }}

{{/*
A service of the plane that only watches: a Deployment. Takes root, component, member, replicas,
args, port, path (of its probe), resources, and image if it is another.
*/}}
{{- define "multiplane.service" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "multiplane.name" . }}
  labels: {{- include "multiplane.labels" . | nindent 4 }}
spec:
  replicas: {{ .replicas }}
  selector:
    matchLabels: {{- include "multiplane.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "multiplane.labels" . | nindent 8 }}
    spec:
      automountServiceAccountToken: false
      securityContext: {fsGroup: 10001}
      {{- with .root.Values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      topologySpreadConstraints: {{- include "multiplane.spread" . | nindent 8 }}
      containers:
        - name: {{ .component }}
          image: {{ .image | default (include "multiplane.image" .root) }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          args: {{- toYaml .args | nindent 12 }}
          env: {{- include "multiplane.bus" . | nindent 12 }}
          {{- if .port }}
          ports: [{name: http, containerPort: {{ .port }}}]
          readinessProbe: {httpGet: {path: {{ .path }}, port: http}, periodSeconds: 5}
          livenessProbe: {httpGet: {path: {{ .path }}, port: http}, periodSeconds: 10, failureThreshold: 6}
          {{- end }}
          resources: {{- toYaml .resources | nindent 12 }}
          securityContext: {{- include "multiplane.contained" . | nindent 12 }}
          volumeMounts: {{- include "multiplane.mounts" . | nindent 12 }}
      volumes: {{- include "multiplane.volumes" . | nindent 8 }}
{{- end }}
