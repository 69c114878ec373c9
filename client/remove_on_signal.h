// RemoveOnSignal: a file, a directory or a shared-memory object that is removed when a signal ends
// the process.
#pragma once

#include <utility>

#include "absl/strings/string_view.h"

namespace awqd::client {

// Names a file from construction to destruction. Where the program called RemoveFilesOnSignals, a
// signal that ends the process in between removes the file; it need not exist yet. A directory is
// removed where all files in it have such a name. Move-only.
class RemoveOnSignal {
 public:
  RemoveOnSignal() = default;
  explicit RemoveOnSignal(absl::string_view path);
  RemoveOnSignal(RemoveOnSignal&& other) noexcept { *this = std::move(other); }
  RemoveOnSignal& operator=(RemoveOnSignal&& other) noexcept;
  ~RemoveOnSignal();

  struct Entry;

 private:
  Entry* entry_ = nullptr;
};

// For a program's main: SIGHUP, SIGINT and SIGTERM remove such files, and the process still dies of
// the signal. One that is ignored, as under nohup, stays so.
void RemoveFilesOnSignals();

}  // namespace awqd::client
