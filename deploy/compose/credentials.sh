#!/bin/sh
# Gives every member of the plane its own password, in a volume that nobody else mounts, and NATS a
# certificate. Made once and kept; the members' permissions are written anew at every start.
set -eu
umask 027
cd /credentials

model=$(printf '%s' "${GPU_MODEL:?}" | sed 's/[&|\\]/\\&/g')
sed "s|GPU_MODEL|$model|" /setup/members.toml > /tmp/members.toml
[ -s operator/secret ] || head -c 32 /dev/urandom | base64 | tr -d '=\n' > operator/secret
accounts() { python -m controlplane.bus.accounts /tmp/members.toml --secret-file operator/secret "$@"; }

mkdir -p nats/tls
if ! openssl x509 -in nats/tls/server.pem -noout -checkend 2592000 >/dev/null 2>&1; then
    cd nats/tls
    key='-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes'
    # shellcheck disable=SC2086
    openssl req -x509 $key -keyout /tmp/ca.key -out ca.pem -days 825 -subj '/CN=multiplane bus CA' \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign \
        2>/tmp/log || { cat /tmp/log; exit 1; }
    # shellcheck disable=SC2086
    openssl req $key -keyout server.key -out /tmp/server.csr -subj /CN=nats 2>/tmp/log
    # Python 3.13 trusts nobody whose certificate does not name its authority's key.
    printf '%s\n' subjectAltName=DNS:nats,DNS:localhost,IP:127.0.0.1 authorityKeyIdentifier=keyid \
        > /tmp/names
    openssl x509 -req -in /tmp/server.csr -CA ca.pem -CAkey /tmp/ca.key -CAcreateserial \
        -CAserial /tmp/serial -days 825 -extfile /tmp/names -out server.pem 2>/tmp/log
    rm -f /tmp/ca.key # nobody else gets a certificate from this CA
    cd /credentials
fi
accounts > nats/users.conf
cp /setup/nats.conf nats/nats.conf
for folder in operator router sidecar-1 sidecar-2 sidecar-3 sidecar-gpu detector predictor auditor; do
    accounts --password-of "$folder" > "$folder/password"
    cp nats/tls/ca.pem "$folder/ca.pem"
done
