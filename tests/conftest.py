"""Shape annotations are enforced while testing: a wrong shape fails where it happens."""

from jaxtyping import install_import_hook

install_import_hook(["recon_core"], "beartype.beartype")
