// The flags, and what people type for them.
#pragma once

#include <string>

#include "CLI/CLI.hpp"
#include "server/config/options.h"

namespace awqd {

// Registers every flag, with its group, its help and its environment twin, to be read into
// `options`, which must outlive `app`. Values are in range once CLI11 has parsed them.
void AddFlags(CLI::App* app, Options* options);

// Those of certificates, tokens, and what one client may take.
class FlagTable;
void AddSecurityFlags(FlagTable& table, Options& options);

// What people type -> what CLI11 reads as a number. Each rewrites its text, ParseNamedFolder aside;
// its result is the error, or nothing, as CLI11's transformations have it.

// "64MiB" -> "67108864". Units k, m, g, with or without b or ib, in either case.
std::string ParseBytes(std::string& text);

// "auto" and "default" -> ThresholdTable's words for them; a count stays as it is.
std::string ParseThreshold(std::string& text);

// "NAME=DIR" -> the two; the name is one that models may have. `out` is unspecified on an error.
std::string ParseNamedFolder(const std::string& text, repository::NamedFolder* out);

// "0660" -> "432", that number: permissions in octal, up to 0777.
std::string ParseMode(std::string& text);

}  // namespace awqd
