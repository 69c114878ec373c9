# Completion of awqctl for bash, from what awqctl itself says of its commands and flags.

# What awqctl says of its flags, in the words of $@: those flags.
_awqctl_flags() {
  awqctl "$@" 2>/dev/null | grep -oE -- '^ +-[-a-z0-9_,]+' | grep -oE -- '--[a-z0-9_]+'
}

_awqctl() {
  local word="${COMP_WORDS[COMP_CWORD]}" command="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${COMP_WORDS[i]}" in
      --address | --timeout | --tls_ca | --tls_cert | --tls_key | --token_file) ((i++)) ;;
      -*) ;;
      *)
        command="${COMP_WORDS[i]}"
        break
        ;;
    esac
  done
  if [[ "$word" == -* ]]; then
    # Flags of awqctl itself may stand behind a command too.
    local flags
    flags="$(_awqctl_flags --help)"
    [[ -z "$command" || "$command" == help ]] || flags+=" $(_awqctl_flags help "$command")"
    mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$word" | sort -u)
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
