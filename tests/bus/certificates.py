"""A certificate authority for a test."""

import subprocess
from pathlib import Path

CERTIFICATES = """
set -e
new_key='-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes'
openssl req -x509 $new_key -keyout ca.key -out ca.pem -days 2 -subj '/CN=test CA' \\
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign
openssl req $new_key -keyout server.key -out server.csr -subj /CN=localhost
echo subjectAltName=IP:127.0.0.1,DNS:localhost > names
echo authorityKeyIdentifier=keyid >> names
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 \\
    -extfile names -out server.pem
"""


def make_certificates(folder: Path) -> None:
    """Write a CA and a certificate of this host."""
    folder.mkdir()
    subprocess.run(["sh", "-c", CERTIFICATES], cwd=folder, check=True, capture_output=True)
