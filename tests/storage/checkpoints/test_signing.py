"""Keys that sign manifests, and strong digests."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from ckptd.storage.checkpoints.reader import SignedStore, read_manifest
from ckptd.storage.checkpoints.sealed_json import ManifestError
from ckptd.storage.checkpoints.signing import (
    ManifestSigner,
    Signers,
    SigningError,
    create_signer,
    trust_signer,
)
from ckptd.storage.strong_digest import (
    fastest_algorithm,
    is_strong_digest,
    matches,
    strong_digest,
)
from tests.storage.memory_store import MemoryStore
from tests.storage.samples import Writer, window


def test_a_trusted_signer_is_believed_and_nobody_else(tmp_path: Path) -> None:
    here, there, stranger = tmp_path / "here", tmp_path / "there", tmp_path / "stranger"
    create_signer(here)
    trust_signer(here, "there", create_signer(there))
    create_signer(stranger)
    trusted, text = Signers.load(here), b"what is signed"
    for folder in (here, there):
        signer = ManifestSigner.load(folder)
        assert trusted.objection(signer.public, signer.sign(text), text) == ""
        assert "bytes were changed" in trusted.objection(signer.public, signer.sign(b"other"), text)
    other = ManifestSigner.load(stranger)
    assert "not trusted" in trusted.objection(other.public, other.sign(text), text)
    assert trusted.objection("", b"", text) == "it is not signed"


def test_where_signatures_are_not_required_those_of_known_signers_must_be_theirs(
    tmp_path: Path,
) -> None:
    """Who reads a store without `store_signed_only` believes what nobody signed, and what strangers
    signed; not what says that it is of a signer that is known, and is not.
    """
    create_signer(tmp_path)
    create_signer(tmp_path / "stranger")
    signer, stranger = ManifestSigner.load(tmp_path), ManifestSigner.load(tmp_path / "stranger")
    store = MemoryStore()
    plain = Writer(store).commit(window(11))
    forged = replace(plain.signed_by(signer), num_slots=7)
    signers = Signers.found(tmp_path)
    assert signers is not None
    for manifest, lax, strict in (
        (plain, "", "not signed"),
        (plain.signed_by(signer), "", ""),
        (plain.signed_by(stranger), "", "not trusted"),
        (forged, "bytes were changed", "bytes were changed"),
    ):
        store.put(plain.key, [memoryview(manifest.to_bytes())])
        for required, why in ((False, lax), (True, strict)):
            reader = SignedStore(store, signers, required=required)
            if why:
                with pytest.raises(ManifestError, match=why):
                    read_manifest(reader, plain.key)
            else:
                assert read_manifest(reader, plain.key) == manifest


def test_nobody_need_be_trusted_where_signatures_are_not_required(tmp_path: Path) -> None:
    """A file that holds no key is told all the same."""
    assert Signers.found(tmp_path) is None
    (tmp_path / "signers").mkdir()
    (tmp_path / "signers" / "bad.pub").write_text("nonsense")
    with pytest.raises(SigningError, match="no key"):
        Signers.found(tmp_path)


def test_a_secret_is_private_and_is_never_overwritten(tmp_path: Path) -> None:
    create_signer(tmp_path)
    path = tmp_path / "sign.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(SigningError, match="not overwritten"):
        create_signer(tmp_path)
    assert path.read_text().strip() not in repr(ManifestSigner.load(tmp_path))
    path.chmod(0o644)
    with pytest.raises(SigningError, match="chmod 600"):
        ManifestSigner.load(tmp_path)


def test_missing_and_damaged_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(SigningError, match=r"sign\.key.*new-signer"):
        ManifestSigner.load(tmp_path)
    with pytest.raises(SigningError, match="trust-signer"):
        Signers.load(tmp_path)
    for name, key in (("../x", "0a" * 32), ("x", "0a" * 31)):
        with pytest.raises(SigningError):
            trust_signer(tmp_path, name, key)
    trust_signer(tmp_path, "x", "0a" * 32)
    (tmp_path / "signers" / "x.pub").write_text("nothing")
    with pytest.raises(SigningError, match=r"x\.pub"):
        Signers.load(tmp_path)


@pytest.mark.parametrize("algorithm", ["", "blake3", "sha256"])
def test_a_digest_names_its_algorithm(algorithm: str) -> None:
    digest = strong_digest(b"data", algorithm)
    assert is_strong_digest(digest)
    assert digest.startswith(algorithm or fastest_algorithm())
    expected = {
        "blake3": blake3(b"data").hexdigest(),
        "sha256": hashlib.sha256(b"data").hexdigest(),
    }
    assert digest.partition(":")[2] == expected[digest.partition(":")[0]]
    assert matches(memoryview(b"data"), digest)
    assert not matches(b"Data", digest)


@pytest.mark.parametrize("text", ["", "md5:00", "blake3:" + "0" * 63, "sha256:" + "G" * 64])
def test_what_is_no_digest_is_refused(text: str) -> None:
    assert not is_strong_digest(text)
    with pytest.raises(ValueError, match="is not a digest"):
        matches(b"data", text)
