"""`palimpsest attack`: the attacks on something that is given as a file, one line each."""

from __future__ import annotations

import typer

from flows.cli.attack_autoencoder import autoencoder_app
from flows.cli.attack_instahide import encodings_app
from flows.cli.attack_inversion import inversion_app
from flows.cli.attack_weights import weights_app

attack_app = typer.Typer(no_args_is_help=True, help="Attack a network that is already trained.")
attack_app.add_typer(weights_app)
attack_app.add_typer(encodings_app)
attack_app.add_typer(autoencoder_app)
attack_app.add_typer(inversion_app)
