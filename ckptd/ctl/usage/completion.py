"""`ckptctl completion`: scripts for bash, zsh and fish, made from the parser's own tree.

Commands, options and choices are in the script. Jobs and runs come from the running daemon when they are
needed, through `ckptctl completion names`. A place in the tree is a path such as ``/keys/list``.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from functools import partial

from ckptd.ctl.command import CommandOutcome, Commands, connected
from ckptd.ctl.peers_command import known_runs

_NAMES_S = 2.0
_FIELDS = {"job": 1, "run": 2}  # of a line of `ckptctl completion names`


def add_completion_command(commands: Commands, root: argparse.ArgumentParser) -> None:
    """Add `completion`, for the commands that ``root`` has when it runs."""
    text = "print a completion script for a shell: `source <(ckptctl completion bash)`"
    parser = commands.add("completion", partial(_completion, root), text, timeout_s=_NAMES_S)
    shell_help = "names: print the jobs and runs that the daemon knows, as the scripts do"
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "names"), help=shell_help)


def _completion(root: argparse.ArgumentParser, args: argparse.Namespace) -> CommandOutcome:
    if args.shell == "names":
        with connected(args) as client:
            names = [f"{job}/{run}" for job, run in known_runs(client)]
        return CommandOutcome(names, "\n".join(names))
    script = _fish(root) if args.shell == "fish" else _bash(root)
    if args.shell == "zsh":
        script = f"{_ZSH}\n{script}"
    return CommandOutcome({"shell": args.shell, "script": script}, script)


# -- the tree -------------------------------------------------------------------------------------


def _places(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield path, parser
    for name, each in _subcommands(parser).items():
        yield from _places(each, f"{path}/{name}")


def _subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return groups[0].choices if groups else {}


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Its positional arguments, without the subcommand."""
    plain = [action for action in parser._actions if not action.option_strings]
    return [action for action in plain if not isinstance(action, argparse._SubParsersAction)]


def _takes_value(action: argparse.Action) -> bool:
    """Whether the next word is its value; of ``--watch [SECONDS]`` it need not be."""
    return action.nargs is None or (isinstance(action.nargs, int) and action.nargs > 0)


# -- bash, and zsh through its bashcompinit -------------------------------------------------------

_ZSH = """\
(( $+functions[compdef] )) || {
    autoload -U compinit && compinit
}
autoload -U +X bashcompinit && bashcompinit"""
# `path` and `words` are variables of zsh itself.
_BASH = """\
_ckptctl_names() {{
    ckptctl completion names 2>/dev/null | cut -d/ -f"$1" | sort -u
}}
_ckptctl() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" at="" option="" given=0 key choices="" word i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="${{COMP_WORDS[i]}}"
        if [ -n "$option" ]; then
            option=""
            continue
        fi
        case "$at/$word" in
            {paths}) at="$at/$word" given=0 ;;
            {valued}) option="$word" ;;
            */-*) ;;
            *) given=$((given + 1)) ;;
        esac
    done
    key="$at/$given"
    case "$current" in -*) key="$at/-" ;; esac
    [ -n "$option" ] && key="$at/$option"
    case "$key" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$choices" -- "$current"))
}}
complete -o default -F _ckptctl ckptctl"""


def _bash(root: argparse.ArgumentParser) -> str:
    valued, cases = [], []
    for path, parser in _places(root):
        for option in filter(_takes_value, _options(parser)):
            patterns = [f"{path}/{name}" for name in option.option_strings]
            valued += patterns
            cases.append(_case("|".join(patterns), _bash_words(option)))
        for index, argument in enumerate(_arguments(parser)):
            cases.append(_case(f"{path}/{index}", _bash_words(argument)))
        if names := _subcommands(parser):
            cases.append(_case(f"{path}/0", " ".join(names)))
        expects = bool(_arguments(parser) or names)
        options = " ".join(name for option in _options(parser) for name in option.option_strings)
        cases.append(_case(f"{path}/-" if expects else f"{path}/-|{path}/0", options))
    paths = "|".join(path for path, _ in _places(root) if path)
    return _BASH.format(paths=paths, valued="|".join(valued), cases="\n".join(cases))


def _case(patterns: str, words: str) -> str:
    return f'        {patterns}) choices="{words}" ;;'


def _bash_words(action: argparse.Action) -> str:
    """The words that may stand there; "": the shell completes names of files."""
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    return f"$(_ckptctl_names {_FIELDS[action.dest]})" if action.dest in _FIELDS else ""


# -- fish -----------------------------------------------------------------------------------------

_FISH = """\
function __ckptctl_names
    ckptctl completion names 2>/dev/null | string split -f $argv[1] / | sort -u
end
function __ckptctl_at
    set -l path ""
    for word in (commandline -opc)[2..]
        contains -- "$path/$word" {paths}; and set path "$path/$word"
    end
    test "$path" = "$argv[1]"
end
complete -c ckptctl -f"""


def _fish(root: argparse.ArgumentParser) -> str:
    paths = " ".join(path for path, _ in _places(root) if path)
    lines = [_FISH.format(paths=paths)]
    for path, parser in _places(root):
        at = f"complete -c ckptctl -n '__ckptctl_at \"{path}\"'"
        for name, each in _subcommands(parser).items():
            lines.append(f"{at} -a {name} -d {shlex.quote(each.description or '')}")
        for option in _options(parser):
            about = (option.help or "").replace("%%", "%").replace("%(default)s", str(option.default))
            lines.append(f"{at} {_fish_names(option)}{_fish_values(option)} -d {shlex.quote(about)}")
        lines += [f"{at}{_fish_values(argument)}" for argument in _arguments(parser)]
    return "\n".join(lines)


def _fish_names(option: argparse.Action) -> str:
    return " ".join(
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.option_strings
    )


def _fish_values(action: argparse.Action) -> str:
    """The values of an option or an argument; files, where nothing else is known."""
    if action.option_strings and not _takes_value(action):
        return ""
    required, alone = (" -r", " -x") if action.option_strings else ("", "")
    if action.choices is not None:
        return f"{alone} -a {shlex.quote(' '.join(map(str, action.choices)))}"
    if action.dest in _FIELDS:
        return f"{alone} -a '(__ckptctl_names {_FIELDS[action.dest]})'"
    return f"{required} -F"
