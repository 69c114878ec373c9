# Completion of awqctl for bash, from what awqctl itself says of its commands and flags.
_awqctl() {
  local word="${COMP_WORDS[COMP_CWORD]}" command="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${COMP_WORDS[i]}" in
      --address | --timeout) ((i++)) ;;
      -*) ;;
      *)
        command="${COMP_WORDS[i]}"
        break
        ;;
    esac
  done
  if [[ -n "$command" && "$command" != help && "$word" == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$(awqctl help "$command" 2>/dev/null | grep -oE -- '^ +(-[a-z],)?--[a-z0-9_]+' |
      grep -oE -- '--.*') --help --address --timeout --json" -- "$word")
  elif [[ -z "$command" && "$word" == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$(awqctl --help 2>/dev/null | grep -oE -- '^ +(-[a-z],)?--[a-z0-9_]+' |
      grep -oE -- '--.*')" -- "$word")
  elif [[ -z "$command" || "$command" == help ]]; then
    # Commands stand two columns from the left, in small letters.
    mapfile -t COMPREPLY < <(compgen -W "$(awqctl --help 2>/dev/null | sed -nE 's/^  ([a-z][a-z-]+)  .*/\1/p' |
      grep -v '^awqctl$')" -- "$word")
  else
    compopt -o default
    COMPREPLY=()
  fi
}
complete -F _awqctl awqctl
