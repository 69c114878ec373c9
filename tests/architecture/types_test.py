#!/usr/bin/env python3
"""No two types or inline variables of one qualified name: checks each that a file defines in a namespace.

GCC's -Wodr (preset lto) compares the types that one program links without CUDA. This looks at the whole tree, and at what
happens to be equal. Unnamed namespaces and functions are a file's own.
"""
import collections
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = {".h", ".cc", ".cu", ".cuh"}

# Skipped text (comments, preprocessor lines, literals), else a name, "::" or one character.
TOKEN = re.compile(r"""(?P<skip>//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:\\\n|[^\n])*|R"(?P<end>\w*)\(.*?\)(?P=end)"
                       |"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')|\w+|::|[^\s\w]""", re.DOTALL | re.MULTILINE | re.VERBOSE)
KEYWORDS = {"class", "struct", "union", "enum"}


def without_template(head):
    """The text after "template <...>"."""
    depth = 0
    for at, token in enumerate(head[1:], 1):
        depth += (token == "<") - (token == ">")
        if depth == 0:
            return head[at + 1:]
    return []


def scope_of(head):
    """(kind, name) of the scope that "{" opens after these tokens; kind is namespace, type or other."""
    if "namespace" in head:
        name = "".join(head[head.index("namespace") + 1:])
        return ("namespace", name) if name else ("other", "")
    while head and head[0] == "template":
        head = without_template(head)
    if not head or head[0] not in KEYWORDS:
        return "other", ""
    while head and head[0] in KEYWORDS:
        head = head[1:]
    if head and head[0] == "alignas":
        head = head[head.index(")") + 1:]
    # The names before the base classes; a function that returns a struct has parentheses, a specialisation has "<".
    names = head[:head.index(":")] if ":" in head else head
    names = [name for name in names if name != "final" and not name.startswith("ABSL_")]
    named = len(names) % 2 == 1 and all(token == "::" for token in names[1::2])
    return ("type", "".join(names)) if named else ("other", "")


def inline_variable(head):
    """The name of the inline variable that these tokens define, or None."""
    if "=" in head:
        head = head[:head.index("=")]
    if "inline" not in head or "(" in head:
        return None
    return (head[:head.index("[")] if "[" in head else head)[-1]


def types_of(text):
    """The qualified names of the types and inline variables that a source defines."""
    scopes, head, found = [], [], []
    for match in TOKEN.finditer(text):
        token = match.group()
        if match["skip"]:
            continue
        variable = inline_variable(head) if token in "{;" else None
        if variable and all(kind == "namespace" for kind, _ in scopes):
            found.append("::".join([name for _, name in scopes] + [variable]))
        if token == "{":
            scope = scope_of(head)
            if scope[0] == "type" and all(kind != "other" for kind, _ in scopes):
                found.append("::".join([name for _, name in scopes] + [scope[1]]))
            scopes.append(scope)
        elif token == "}" and scopes:
            scopes.pop()
        if token in "{};":
            head = []
        else:
            head.append(token)
    return found


class Types(unittest.TestCase):

    def test_every_name_is_defined_once(self):
        files = collections.defaultdict(list)
        for top in ("kernels", "server", "client", "tests"):
            for path in sorted((ROOT / top).rglob("*")):
                if path.suffix in SOURCES:
                    for name in types_of(path.read_text(encoding="utf-8")):
                        files[name].append(path.relative_to(ROOT).as_posix())
        self.assertGreater(len(files), 200)
        twice = [f"{name}: {', '.join(paths)}" for name, paths in sorted(files.items())
                 if len(set(paths)) > 1]  # a file may have two behind #if
        self.assertEqual(twice, [], "\n" + "\n".join(twice))

    def test_finds_what_counts(self):
        self.assertEqual(types_of("""
            #define BRACE {
            namespace a { namespace b::c {
            struct Forward;
            struct alignas(16) Plain { enum class Inner : int { kOne }; const char* text = "}"; };  // }
            template <class T, int N = (3)> class ABSL_LOCKABLE Generic final : public Base<T> { void F() { struct Local {}; } };
            template <> struct Generic<int> {};
            struct Result Make() { return {}; }
            inline constexpr Plain kTiles[] = {{1, {2}}, {3}};
            inline constexpr int Sum(int a) { return a; }
            inline bool open{true};
            }
            namespace { struct Hidden {}; }
            struct stat stat_ = {};
            union b::Last {};
            }"""), ["a::b::c::Plain", "a::b::c::Plain::Inner", "a::b::c::Generic",
                           "a::b::c::kTiles", "a::b::c::open", "a::b::Last"])


if __name__ == "__main__":
    sys.exit(unittest.main())
