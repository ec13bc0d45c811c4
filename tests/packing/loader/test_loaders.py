"""A `PackedDataset` in the loaders of torch, torchdata and Accelerate."""

import copy
import itertools

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.packing.loader.loader_cases import content, many
from tests.support.slow import slow_after
from trajpack import PackedDataset

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*fork.*:DeprecationWarning",
    "ignore:'set_vital' is deprecated",  # torchdata calls it
    "ignore:This DataLoader will create",  # more workers than processors
)


def dataset(epoch=0, **options):
    found = PackedDataset(many(60), 40, 5, lookahead=16, **options)
    found.set_epoch(epoch)
    return found


class Trajectories(torch.utils.data.Dataset):
    """A data set of torch with items by number."""

    def __init__(self):
        self.items = many(60)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.mark.parametrize("num_workers", slow_after(2, [0, 2, 1, 3]))
def test_a_stream_does_not_depend_on_the_number_of_workers(num_workers):
    loader = DataLoader(dataset(), batch_size=None, num_workers=num_workers)
    assert content(loader) == content(dataset())
    given = PackedDataset(Trajectories(), 40, 5, lookahead=16, rank=1, num_ranks=2)
    loader = DataLoader(given, batch_size=None, num_workers=num_workers)
    assert content(loader) == content(dataset(rank=1, num_ranks=2))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_is_resumed_with_another_number_of_workers(num_workers):
    whole, counted = [*dataset(epoch=1)], 7
    again = dataset()
    again.load_state_dict({"epoch": 1, "taken": counted})
    loader = DataLoader(again, batch_size=None, num_workers=num_workers)
    assert content(loader) == content(whole[counted:])


@pytest.mark.parametrize("num_workers", slow_after(2, [0, 1, 2, 3]))
def test_a_stateful_loader_goes_on_after_any_micro_batch(num_workers):
    whole = [*dataset(epoch=1)]
    for taken in (0, 1, 3, 8, len(whole) - 1):
        loader = StatefulDataLoader(dataset(epoch=1), batch_size=None, num_workers=num_workers)
        begun = [*itertools.islice(loader, taken)]
        state = copy.deepcopy(loader.state_dict())
        again = StatefulDataLoader(dataset(), batch_size=None, num_workers=num_workers)
        again.load_state_dict(state)
        assert content([*begun, *again]) == content(whole)


def test_a_loader_that_resumed_is_resumed():
    resumed = dataset()
    resumed.load_state_dict({"epoch": 1, "taken": 3})
    loader = StatefulDataLoader(resumed, batch_size=None, num_workers=2)
    begun = [*itertools.islice(loader, 4)]
    again = StatefulDataLoader(dataset(), batch_size=None, num_workers=2)
    again.load_state_dict(loader.state_dict())
    assert content([*begun, *again]) == content([*dataset(epoch=1)][3:])


def test_accelerate_takes_it_and_begins_each_epoch_with_its_order():
    configuration = DataLoaderConfiguration(dispatch_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    loader = accelerator.prepare(DataLoader(dataset(), batch_size=None))
    for epoch in range(3):
        assert content(loader) == content(dataset(epoch=epoch))
    fresh = accelerator.prepare(DataLoader(dataset(), batch_size=None))
    assert content(skip_first_batches(fresh, 5)) == content([*dataset()][5:])


def test_accelerate_saves_and_loads_its_state(tmp_path):
    def prepared():
        configuration = DataLoaderConfiguration(
            dispatch_batches=False, use_stateful_dataloader=True
        )
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        return accelerator, accelerator.prepare(DataLoader(dataset(), batch_size=None))

    accelerator, loader = prepared()
    whole = [*dataset()]
    for taken, _ in enumerate(loader, start=1):
        if taken == 6:
            accelerator.save_state(tmp_path)
            break
    accelerator, loader = prepared()
    accelerator.load_state(tmp_path)
    assert content(loader) == content(whole[6:])
