"""Signatures of manifests (Ed25519): they prove which node wrote a checkpoint.

    <folder>/sign.key              the secret of this node, 64 hexadecimal digits, 0600
    <folder>/sign.pub              its public key, for others
    <folder>/signers/<name>.pub    the public key of a trusted node

A manifest contains the digest of every image, so its signature covers all bytes that a restore reads
(docs/format.md section 4).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ckptd.private_files import new_private_file, replace_private_file

SIGNER = r"[0-9a-f]{64}"  # a public key identifies the signer
_KEY = re.compile(SIGNER)
_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}\Z")
_OTHERS = 0o077


class SigningError(ValueError):
    """A key file is missing, damaged or not safe; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class ManifestSigner:
    """Signs manifests; its public key is its name."""

    _secret: Ed25519PrivateKey = field(repr=False)
    public: str

    @classmethod
    def load(cls, folder: Path) -> ManifestSigner:
        """Load the key of this node; SigningError if it is missing or damaged, or others can read it."""
        path = Path(folder) / "sign.key"
        try:
            mode, text = path.stat().st_mode, path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SigningError(
                f"no usable key in {path}: {error}; create one with `ckptctl keys new-signer`"
            ) from error
        if mode & _OTHERS:
            raise SigningError(f"other users can read {path}: run chmod 600 {path}")
        if not _KEY.fullmatch(text):
            raise SigningError(f"{path} is not 64 hexadecimal digits")
        return cls._of(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text)))

    @classmethod
    def _of(cls, secret: Ed25519PrivateKey) -> ManifestSigner:
        return cls(secret, secret.public_key().public_bytes_raw().hex())

    def sign(self, data: bytes) -> bytes:
        return self._secret.sign(data)


@dataclass(frozen=True, slots=True)
class Signers:
    """The trusted signers: names by public key."""

    names: Mapping[str, str]

    @classmethod
    def load(cls, folder: Path) -> Signers:
        """Load the signers in ``<folder>/signers``, and this node's own.

        Raises:
            SigningError: there is no signer, or a file contains no key. Ignoring such a file would
                make good checkpoints unusable.
        """
        folder = Path(folder)
        files = {path.stem: path for path in sorted((folder / "signers").glob("[!.]*.pub"))}
        if (folder / "sign.pub").exists():
            files["this node"] = folder / "sign.pub"
        names: dict[str, str] = {}
        for name, path in files.items():
            names[_read_public(path)] = name
        if not names:
            raise SigningError(
                f"no signer is trusted: add one to {folder / 'signers'} with `ckptctl keys trust-signer`"
            )
        return cls(names)

    @classmethod
    def found(cls, folder: Path) -> Signers | None:
        """Like `load`, but None if there is no signer."""
        folder = Path(folder)
        some = any((folder / "signers").glob("[!.]*.pub")) or (folder / "sign.pub").exists()
        return cls.load(folder) if some else None

    def objection(self, signer: str, signature: bytes, data: bytes) -> str:
        """The reason why ``data`` is not accepted; "" if a trusted signer signed it."""
        if not signer:
            return "it is not signed"
        if signer not in self.names:
            return f"it is signed by {signer}, which is not trusted"
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer)).verify(signature, data)
        except InvalidSignature:
            return f"its signature is not that of {self.names[signer]}: its bytes were changed"
        return ""


def create_signer(folder: Path) -> str:
    """Create this node's key, and its folder (mode 0700) if missing; returns the public key.

    Raises:
        SigningError: a key exists already (it is never overwritten), or it cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = Ed25519PrivateKey.generate()
    public = secret.public_key().public_bytes_raw().hex()
    _write_new(folder / "sign.key", secret.private_bytes_raw().hex())
    _write_new(folder / "sign.pub", public)
    return public


def trust_signer(folder: Path, name: str, public: str) -> None:
    """Trust the node ``name`` with this key, which replaces its previous one; may raise SigningError."""
    if not _NAME.match(name):
        raise SigningError(f"{name!r} is not a valid name: use 1 to 64 letters, digits, '.', '_', '-'")
    if not _KEY.fullmatch(public):
        raise SigningError("a signer's key is 64 hexadecimal digits")
    target = Path(folder) / "signers" / f"{name}.pub"
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        replace_private_file(target, f"{public}\n".encode("ascii"))
    except OSError as error:
        raise SigningError(f"cannot write {target}: {error}") from error


def _read_public(path: Path) -> str:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SigningError(f"cannot read {path}: {error}") from error
    if not _KEY.fullmatch(text):
        raise SigningError(f"{path} contains no key: 64 hexadecimal digits")
    return text


def _write_new(path: Path, text: str) -> None:
    try:
        new_private_file(path, f"{text}\n".encode("ascii"))
    except FileExistsError as error:
        raise SigningError(f"{path} exists and is not overwritten") from error
    except OSError as error:
        raise SigningError(f"cannot write {path}: {error}") from error
