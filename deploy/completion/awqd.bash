# Completion of awqd for bash, from what awqd itself says of its flags.
_awqd() {
  local word="${COMP_WORDS[COMP_CWORD]}"
  if [[ "$word" == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$(awqd --help=all 2>/dev/null | grep -oE -- '^ +-[-a-z0-9_,]+' |
      grep -oE -- '--[a-z0-9_]+')" -- "$word")
  else
    compopt -o default
    COMPREPLY=()
  fi
}
complete -F _awqd awqd
