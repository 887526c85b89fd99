#!/bin/bash
# In Grafana's place where its image cannot be had: reads what Grafana is given, writes where it
# writes, and answers its health check.
set -eu
test -r /etc/grafana/provisioning/datasources/prometheus.yaml
test -r /etc/grafana/provisioning/dashboards/multiplane.yaml
test -r /var/lib/grafana/dashboards/multiplane.json
touch /var/lib/grafana/grafana.db
mkdir -p /tmp/www/api
echo '{"database": "ok"}' > /tmp/www/api/health
exec busybox httpd -f -p 3000 -h /tmp/www
