"""A model's folder: loaded through the door for strangers' files, saved with its card."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from trailmark import pretrained
from trailmark.models.card.files import UPLOAD, Saving


class FolderMixin(PreTrainedModel):
    """``from_pretrained`` and ``save_pretrained`` of the models."""

    # --- loading ----------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' ``from_pretrained``, of what may come from anywhere (:mod:`trailmark.pretrained`).

        Weights are read from safetensors alone, no code that lies beside them is run, and numbers are finite.

        Raises:
            ValueError: weights in another format, of other sizes than config.json says, or not finite; a file that is
                none; a configuration that cannot be one.
        """
        where, subfolder = pretrained_model_name_or_path, kwargs.get("subfolder") or ""
        if kwargs.get("use_safetensors") is False:
            raise ValueError(
                "use_safetensors: expected True, got False: other formats can hold code. Convert the weights first "
                "(docs/security.md)."
            )
        if where is not None:
            fields = pretrained.expect_readable(where, "model", subfolder)
            pretrained.expect_safetensors(where, "model", subfolder)
            known = config if isinstance(config, PreTrainedConfig) else fields
            pretrained.expect_fits(known, where, "model", subfolder=subfolder)
        options = kwargs | pretrained.WEIGHTS_ALONE
        loaded: Any = super().from_pretrained(where, *model_args, config=config, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        pretrained.expect_finite(model.named_parameters(), "model", where or "what was given")
        if where is not None:
            pretrained.expect_generation(model, "model", where)
        return loaded

    # --- saving -----------------------------------------------------------------------------------------------

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        *args: Any,
        card: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """transformers' ``save_pretrained``, and a model card: README.md (docs/evaluation.md says what stands in it).

        Args:
            push_to_hub: whether to push the model too: see :meth:`push_to_hub`, whose arguments may stand here.
            card: whether to write one; what a person wrote or edited is never replaced. None: unless ``state_dict`` is
                given, as checkpoints within a training are saved.
        """
        folder = Path(save_directory)
        writes = state_dict is None if card is None else card
        own_card = None
        if is_main_process and (writes or push_to_hub):  # it reads all weights of where the model came from
            own_card = Saving(self.name_or_path, self.config, self.num_parameters(), folder)
        upload = {name: kwargs.pop(name) for name in UPLOAD if name in kwargs}
        save: Any = super().save_pretrained
        save(folder, is_main_process, state_dict, False, *args, **kwargs)
        if own_card is not None and writes:
            own_card.write()
        if own_card is not None and push_to_hub:
            upload = {"repo_id": folder.name, "tags": self.model_tags, "token": kwargs.get("token")} | upload
            own_card.upload(lambda to: save(to, True, state_dict, False, *args, **kwargs), **upload)

    def push_to_hub(self, repo_id: str, *, max_shard_size: int | str = "50GB", **options: Any) -> Any:
        """transformers' ``push_to_hub`` with our model card, which never replaces one that a person wrote or edited.

        Args:
            options: as of transformers: commit_message, commit_description, private, token, revision, create_pr, tags.
        """
        own_card = Saving(self.name_or_path, self.config, self.num_parameters())

        def save(folder: Path) -> None:
            self.save_pretrained(folder, max_shard_size=max_shard_size, card=False)

        return own_card.upload(save, repo_id, **options)
