// RepositoryRoot: the one place where a name becomes an open file, and never one outside the root.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/file.h"

namespace awqd::model {

// Symbolic links are followed as long as every step stays beneath the root, so that a directory in
// which "my-model" is a relative link into a Hub cache beneath the same root works. Thread-safe.
class RepositoryRoot final : public FileSource {
 public:
  enum class Resolve {
    kKernel,       // openat2(RESOLVE_BENEATH), or kCanonicalise where the kernel lacks it
    kCanonicalise  // realpath, compare with the root's, open, compare what was opened
  };

  // NOT_FOUND or PERMISSION_DENIED naming the root, INVALID_ARGUMENT when it is not a directory.
  static absl::StatusOr<RepositoryRoot> Open(const std::string& path,
                                             Resolve how = Resolve::kKernel);

  // The folder `path` alone, of which paths begin with `as` instead: "as/config.json" is its
  // config.json, and there is nothing else. Fails as Open does.
  static absl::StatusOr<RepositoryRoot> OpenFolder(const std::string& path, const std::string& as,
                                                   Resolve how = Resolve::kKernel);

  absl::StatusOr<File> OpenFile(absl::string_view relative) const override;
  absl::StatusOr<std::vector<std::string>> ListDirectory(absl::string_view relative) const override;

  // A directory as it was when it was opened, whatever its path leads to later.
  struct Held {
    UniqueFd fd;
    std::string path;  // from the root on, without links
  };
  absl::StatusOr<Held> Hold(absl::string_view relative) const;
  // OpenFile and ListDirectory in such a directory. `name` is one component, `relative` what
  // messages call it.
  absl::StatusOr<File> OpenFileIn(const Held& directory, const std::string& name,
                                  absl::string_view relative) const;
  absl::StatusOr<std::vector<std::string>> ListIn(const Held& directory,
                                                  absl::string_view relative) const;

 private:
  absl::StatusOr<UniqueFd> OpenBeneath(const std::string& relative, int flags) const;
  // `path`: of the file, links and all; `relative` is for messages.
  absl::StatusOr<UniqueFd> OpenCanonical(const std::string& relative, const std::string& path,
                                         int flags) const;
  absl::StatusOr<UniqueFd> OpenIn(const Held& directory, const std::string& name,
                                  const std::string& relative) const;
  absl::StatusOr<std::string> RealRoot() const;
  absl::StatusOr<std::string> Inside(const std::string& relative) const;

  std::string path_;
  std::string as_;  // empty: paths are those from the root on
  UniqueFd root_;
  Resolve how_ = Resolve::kKernel;
};

// True for one component of a path: 1 to 255 bytes, no '/', no NUL, neither "." nor "..".
bool IsPlainFileName(absl::string_view name);

}  // namespace awqd::model
