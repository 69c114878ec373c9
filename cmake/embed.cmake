# cmake -DOUT=<file.cc> -DFILES=<file>;... -P embed.cmake: the files as strings of C++, one function for all
# (server/obs/metrics_server.h). Bytes in hexadecimal: no text in them can end a literal.
set(text "// Made by cmake/embed.cmake.\n#include \"server/obs/metrics_server.h\"\n\nnamespace awqd::obs {\n\n")
string(APPEND text "absl::string_view PageFile(absl::string_view name) {\n")
foreach(file IN LISTS FILES)
  cmake_path(GET file FILENAME name)
  file(READ ${file} hex HEX)
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${hex}")
  string(APPEND text "  if (name == \"${name}\") {\n    static constexpr char kBytes[] = {${bytes}};\n")
  string(APPEND text "    return {kBytes, sizeof(kBytes)};\n  }\n")
endforeach()
string(APPEND text "  return {};\n}\n\n}  // namespace awqd::obs\n")
file(WRITE ${OUT} "${text}")
