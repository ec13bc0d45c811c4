"""The public surface is a promise: what it holds, that it is sorted, and that it is documented."""

import inspect

import pytest

import trajpack


def test_the_facade_exports_what_users_were_promised():
    assert trajpack.__all__ == sorted(trajpack.__all__, key=lambda name: (name.islower(), name))
    assert set(trajpack.__all__) >= {
        "PackedBatch",
        "Trajectory",
        "TrajectoryBuffer",
        "Turn",
        "VersionSpan",
        "pack",
    }


@pytest.mark.parametrize("name", trajpack.__all__)
def test_every_exported_name_is_documented(name):
    exported = getattr(trajpack, name)
    assert inspect.getdoc(exported)
    if inspect.isclass(exported):
        for member, value in vars(exported).items():
            if not member.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, property)
            ):
                assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize("name", trajpack.__all__)
def test_no_exported_function_swallows_keywords(name):
    exported = getattr(trajpack, name)
    parameters = inspect.signature(exported).parameters.values()
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters)
