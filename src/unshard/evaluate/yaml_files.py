"""Read YAML without duplicate keys, and without a traceback for deep nesting or bad tags."""

from pathlib import Path
from typing import Any

import yaml

from unshard.containers.open_files import read_whole


class _UniqueKeys(yaml.SafeLoader):
    """Refuses duplicate keys of a mapping; PyYAML's own loader keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[tuple[str, object]]()
        for key, _ in node.value:
            is_merge = key.tag == "tag:yaml.org,2002:merge"  # `<<` may be repeated
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen and not is_merge:
                raise yaml.MarkedYAMLError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
            seen.add((key.tag, key.value if isinstance(key, yaml.ScalarNode) else id(key)))
        return node


def read_yaml(source: Path | str) -> object:
    """Return the value in a YAML file or text; raise PyYAML's errors or ValueError."""
    try:
        text = source if isinstance(source, str) else read_whole(source).decode()
        return yaml.load(text, _UniqueKeys)  # noqa: S506 (it is a SafeLoader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (AttributeError, LookupError) as error:  # PyYAML's, for !!bool x or !!int ''
        raise ValueError(f"a value is not what its tag says: {error}") from None
