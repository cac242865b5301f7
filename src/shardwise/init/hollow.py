"""Tensors without memory, and what a recorder knows about the memory of others."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .operators import has_plain_memory
from .record import Constant, Record, View


class Storages:
    """The storages that a recording deals with, as long as something refers to them.

    A *hollow* storage has no bytes, and a number in the record. A storage with memory is *born* if torch made it inside
    the context, so that its values are the constructor's too. It is *exposed* if other code may have its address.
    """

    def __init__(self, record: Record):
        self._record = record
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._births: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._exposed: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._constants: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._next_birth = itertools.count()

    def number_of(self, tensor: Any) -> int | None:
        """The number of a hollow tensor's storage."""
        number: int | None = self._numbers.get(tensor.untyped_storage()) if has_plain_memory(tensor) else None
        return number

    def birth_of(self, tensor: Any) -> int | None:
        """How many storages were born before this tensor's; None if its storage was not born."""
        birth: int | None = self._births.get(tensor.untyped_storage()) if has_plain_memory(tensor) else None
        return birth

    def view_of(self, tensor: torch.Tensor) -> View:
        """The geometry of a hollow tensor."""
        return View.of(tensor, self._numbers[tensor.untyped_storage()])

    def numbers(self) -> dict[int, torch.UntypedStorage]:
        """All hollow storages, by number."""
        return {number: storage for storage, number in self._numbers.items()}

    def hollow(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A new hollow tensor on ``device`` with the size, strides and dtype of ``like``."""
        tensor = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
        storage = tensor.untyped_storage()
        self.empty(storage, self._record.new_storage(storage.nbytes(), tensor.device))
        return tensor

    def empty(self, storage: torch.UntypedStorage, number: int) -> None:
        """Free a storage's memory; from now on it is hollow."""
        self.will_change(storage)
        storage.resize_(0)
        self._births.pop(storage, None)
        self._numbers[storage] = number

    def give_memory(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Undo `empty`. The values are undefined, and the storage counts as born now."""
        storage.resize_(nbytes)
        del self._numbers[storage]
        self.note_birth(storage)

    def lend_memory(self, storages: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Give the hollow ones of ``storages`` memory of their full size; return those."""
        held = [storage for storage in storages if storage in self._numbers]
        for storage in held:
            storage.resize_(self._record.memory[self._numbers[storage]].nbytes)
        return held

    def take_back(self, held: list[torch.UntypedStorage]) -> None:
        """Undo `lend_memory`."""
        for storage in held:
            self._record.grow(self._numbers[storage], storage.nbytes())
            storage.resize_(0)

    def note_birth(self, storage: torch.UntypedStorage) -> None:
        """Note that ``storage`` was born."""
        self._births[storage] = next(self._next_birth)

    def expose(self, storage: torch.UntypedStorage) -> None:
        """Note that other code may have the address of ``storage``."""
        self._exposed[storage] = True

    def can_be_emptied(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory, with what is in it, is the constructor's alone."""
        if self.birth_of(tensor) is None:
            return False
        storage = tensor.untyped_storage()
        return storage.resizable() and storage not in self._exposed

    def constant(self, tensor: torch.Tensor) -> Constant:
        """The values of a tensor with memory, as they are now."""
        constant = Constant(tensor)
        self._constants.setdefault(tensor.untyped_storage(), []).append(constant)
        return constant

    def will_change(self, storage: torch.UntypedStorage) -> None:
        """Copy the constants that refer to ``storage``, which is about to change."""
        for constant in self._constants.pop(storage, ()):
            constant.detach()
