"""Certificates for servers of tests that speak TLS."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest


def certify(folder: Path, name: str, address: str = "127.0.0.1") -> tuple[Path, Path, Path]:
    """Make an authority, and a certificate of it for an address.

    Returns:
        Files with the authority's certificate, the one for the address, and its key.
    """
    x509 = pytest.importorskip("cryptography.x509", reason="needs cryptography")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now, day, paths = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1), []
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"{name} {of}")]) for of in ("CA", "node")]
    for of, key, subject in zip(("CA", "node"), keys, names, strict=True):
        host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        certificate = (
            x509.CertificateBuilder(names[0], subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.BasicConstraints(of == "CA", None), critical=True)
            .add_extension(host, critical=False)
            .sign(keys[0], hashes.SHA256())
        )
        paths.append(folder / f"{name}-{of}.crt")
        paths[-1].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / f"{name}.key").write_bytes(keys[1].private_bytes(serialization.Encoding.PEM, *private))
    return paths[0], paths[1], folder / f"{name}.key"
