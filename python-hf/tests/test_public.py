# SPDX-License-Identifier: MIT OR Apache-2.0
"""cpattn_hf uses public names of cpattn alone: no module, name or field with a leading underscore, and nothing that a module which
says what it exports does not export."""

import ast
import importlib
import unittest
from pathlib import Path

import cpattn_hf

ROOT = Path(cpattn_hf.__file__).parent


def imports():
    """Of each import of cpattn: where it stands, the module, and the name."""
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            place = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "cpattn":
                yield from ((place, node.module, alias.name) for alias in node.names)
            if isinstance(node, ast.Import):
                yield from ((place, alias.name, None) for alias in node.names if alias.name.split(".")[0] == "cpattn")


class Public(unittest.TestCase):
    def test_imports(self):
        found = list(imports())
        self.assertGreater(len(found), 50)
        for place, module, name in found:
            with self.subTest(place):
                self.assertFalse(any(part.startswith("_") for part in module.split(".")), module)
                exports = getattr(importlib.import_module(module), "__all__", None)
                self.assertTrue(name is None or not name.startswith("_"), name)
                self.assertTrue(name is None or exports is None or name in exports, f"{module} does not export {name}")

    def test_attributes(self):
        """No private attribute of something that is not of the file itself: `context._kind` is cpattn's, `self._kind` is not."""
        for file in sorted(ROOT.rglob("*.py")):
            tree = ast.parse(file.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                    text = ast.unparse(node.value)
                    self.assertNotRegex(
                        text,
                        r"\b(context|batch|transport|collectives)\b(?!\()",
                        f"{file.name}:{node.lineno}: {ast.unparse(node)}",
                    )


if __name__ == "__main__":
    unittest.main()
