// HubDownload: a model as `hf download` leaves it in a cache.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace awqd::testing {

inline constexpr char kHubHash[] = "0123456789abcdef0123456789abcdef01234567";

// Moves the files of `model`, a folder, into `cache`/`folder` as blobs, creates relative links to
// them under snapshots/<kHubHash>, and names the revision main.
inline void MakeHubDownload(const std::string& model, const std::string& cache,
                            const std::string& folder) {
  namespace fs = std::filesystem;
  const fs::path home = fs::path(cache) / folder;
  const fs::path snapshot = home / "snapshots" / kHubHash;
  for (const fs::path& path : {home / "blobs", home / "refs", snapshot}) {
    fs::create_directories(path);
  }
  int number = 0;
  for (const fs::directory_entry& file : fs::directory_iterator(model)) {
    const std::string blob = absl::StrCat("blob", number++);
    fs::create_symlink(fs::path("../../blobs") / blob, snapshot / file.path().filename());
    fs::copy_file(file.path(), home / "blobs" / blob);
  }
  fs::remove_all(model);
  std::ofstream(home / "refs/main") << kHubHash;
}

}  // namespace awqd::testing
