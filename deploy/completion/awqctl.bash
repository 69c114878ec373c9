# Completion of awqctl for bash, from what awqctl itself says of its commands, flags and values.

# The flags that awqctl lists when it is called with $@.
_awqctl_flags() {
  awqctl "$@" 2>/dev/null | grep -oE -- '^ {2,6}-[-a-z0-9_,]+' | grep -oE -- '--[a-z0-9_]+'
}

# The values that a command's help lists for a flag, "a|b|c" or "a|b,...". Nothing for others.
_awqctl_values() {
  awqctl help "$1" 2>/dev/null | sed -nE "s/^ +(-[a-z],)?$2 ([^ ]+[|][^ ]+).*/\2/p" | sed 's/,\.\.\.$//' | tr '|' '\n'
}

# Names of models, or of a model's weights, from a server that answers within a second. $@: flags of the connection, models, MODEL.
_awqctl_names() {
  awqctl --timeout 1 --json "$@" 2>/dev/null | sed -nE 's/^   "(name|path)": "(.*)",?$/\2/p'
}

_awqctl() {
  local word="${COMP_WORDS[COMP_CWORD]}" flag="${COMP_WORDS[COMP_CWORD - 1]}" command="" i offered=""
  local -a connection=() positional=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${COMP_WORDS[i]}" in
      --address | --timeout | --tls_ca | --tls_cert | --tls_key | --token_file)
        connection+=("${COMP_WORDS[i]}" "${COMP_WORDS[++i]}")
        ;;
      -*) ;;
      *)
        if [[ -z "$command" ]]; then command="${COMP_WORDS[i]}"; else positional+=("${COMP_WORDS[i]}"); fi
        ;;
    esac
  done
  compopt -o default
  if [[ "$word" == -* ]]; then
    # Flags of awqctl itself may stand behind a command too.
    offered="$(_awqctl_flags --help)"
    [[ -z "$command" || "$command" == help ]] || offered+=" $(_awqctl_flags help "$command")"
  elif [[ -z "$command" || "$command" == help ]]; then
    # Commands stand two columns from the left, in small letters.
    offered="$(awqctl --help 2>/dev/null | sed -nE 's/^  ([a-z][a-z-]+)  .*/\1/p' | grep -v '^awqctl$')"
  elif [[ "$flag" == -* ]]; then
    offered="$(_awqctl_values "$command" "$flag")"
  else
    case "$command:${#positional[@]}" in
      models:0 | unload:0 | dequantize:0 | matmul:0 | mlp:0) offered="$(_awqctl_names "${connection[@]}" models)" ;;
      dequantize:1 | matmul:1) offered="$(_awqctl_names "${connection[@]}" models "${positional[0]}")" ;;
    esac
  fi
  # Of a list the last value is completed.
  local list=""
  [[ "$flag" == --roles ]] && list="${word%"${word##*,}"}"
  mapfile -t COMPREPLY < <(compgen -P "$list" -W "$offered" -- "${word#"$list"}" | awk '!seen[$0]++')
}
complete -F _awqctl awqctl
