{{- define "ckptd.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "ckptd.selector" -}}
app.kubernetes.io/name: ckptd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "ckptd.labels" -}}
{{ include "ckptd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* A size in MiB. */}}
{{- define "ckptd.mebibytes" -}}
{{- $factors := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
{{- mul (regexFind "^[0-9]+" .) (get $factors (regexFind "[A-Z]i$" .)) -}}
{{- end -}}

{{- define "ckptd.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- define "ckptd.unprivileged" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
