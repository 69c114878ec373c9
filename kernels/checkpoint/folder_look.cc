// Walking a folder and noting the stamp of each file.
#include "kernels/checkpoint/folder_look.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"

namespace awqd::model {
namespace {

// As deep as .cache/huggingface/download lies; also the end of links that lead in circles.
constexpr int kMaxDepth = 3;
constexpr int kMaxFiles = 20'000;
constexpr char kSnapshots[] = "/snapshots/";

bool IsOfModel(absl::string_view name) {
  return absl::EndsWith(name, ".json") || absl::EndsWith(name, ".safetensors") ||
         absl::EndsWith(name, ".gguf");
}

class Walk {
 public:
  Walk(const RepositoryRoot& root, FolderLook* out) : root_(root), out_(out) {}

  // `of_model`: whether the model's own files may lie there.
  void Folder(const std::string& path, const std::vector<std::string>& names, int depth,
              bool of_model) {
    for (const std::string& name : names) {
      if (++files_ > kMaxFiles) return;
      const std::string file = absl::StrCat(path, "/", name);
      if (File(file, of_model && IsOfModel(name)) || depth == kMaxDepth) continue;
      const auto inside = root_.ListDirectory(file);
      if (inside.ok()) Folder(file, *inside, depth + 1, false);
    }
  }

  // False: it is no file that can be opened.
  bool File(const std::string& path, bool of_model) {
    const auto file = root_.OpenFile(path);
    std::string* const lines = of_model ? &out_->files : &out_->others;
    // Why it cannot be opened is part of what it looks like: its mode may be put right.
    absl::StrAppend(lines, path, " ",
                    file.ok() ? file->stamp().Text() : std::string(file.status().message()), "\n");
    if (file.ok()) out_->changed = std::max(out_->changed, file->stamp().changed());
    return file.ok();
  }

 private:
  const RepositoryRoot& root_;
  FolderLook* const out_;
  int files_ = 0;
};

}  // namespace

FolderLook LookAt(const RepositoryRoot& root, absl::string_view path) {
  FolderLook out;
  Walk walk(root, &out);
  const std::string folder(path);
  const auto names = root.ListDirectory(folder);
  if (!names.ok()) {
    walk.File(folder, true);
    return out;
  }
  walk.Folder(folder, *names, 0, true);
  if (const size_t at = folder.rfind(kSnapshots); at != std::string::npos) {
    const std::string blobs = absl::StrCat(folder.substr(0, at), "/blobs");
    if (const auto unfinished = root.ListDirectory(blobs); unfinished.ok()) {
      walk.Folder(blobs, *unfinished, kMaxDepth, false);
    }
  }
  return out;
}

}  // namespace awqd::model
