// Opening in the folder that is held, and noting the stamp of each file.
#include "kernels/checkpoint/folder_snapshot.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint_files.h"

namespace awqd::model {
namespace {

// Other files of a folder may come and go.
std::vector<std::string> OnlyTensorFiles(std::vector<std::string> names) {
  std::erase_if(names, [](absl::string_view name) {
    return !absl::EndsWith(name, ".safetensors") && !absl::EndsWith(name, ".gguf");
  });
  return names;
}

// Whether opening a file again failed because the file changed, not because of the system.
bool IsGone(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsInvalidArgument(status);
}

absl::Status CheckFile(const RepositoryRoot& root, const std::string& path,
                       const std::optional<FileStamp>& before) {
  const absl::StatusOr<File> now = root.OpenFile(path);
  if (!now.ok() && !IsGone(now.status())) return now.status();
  if (!before.has_value()) {
    if (absl::IsNotFound(now.status())) return absl::OkStatus();
    return Invalid(absl::CHexEscape(path), ": the file was written while the model was loaded");
  }
  if (now.ok()) return before->Check(now->stamp(), path);
  return Invalid(absl::CHexEscape(path), ": the file was replaced while it was loaded");
}

// As deep as .cache/huggingface/download lies; also the end of links that lead in circles.
constexpr int kMaxDepth = 3;
constexpr int kMaxFiles = 20'000;
constexpr char kSnapshotsDir[] = "/snapshots/";

bool IsOfModel(absl::string_view name) {
  return absl::EndsWith(name, ".json") || absl::EndsWith(name, ".safetensors") ||
         absl::EndsWith(name, ".gguf");
}

class Walk {
 public:
  Walk(const RepositoryRoot& root, FolderState* out) : root_(root), out_(out) {}

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

  // False where it is no file that can be opened.
  bool File(const std::string& path, bool of_model) {
    const auto file = root_.OpenFile(path);
    std::string* const lines = of_model ? &out_->files : &out_->others;
    // The reason that it cannot be opened is part of its state: somebody may correct its mode.
    absl::StrAppend(lines, path, " ",
                    file.ok() ? file->stamp().Text() : std::string(file.status().message()), "\n");
    if (file.ok()) out_->changed = std::max(out_->changed, file->stamp().changed());
    return file.ok();
  }

 private:
  const RepositoryRoot& root_;
  FolderState* const out_;
  int files_ = 0;
};

}  // namespace

absl::Status FilesRead::CheckUnchanged(const RepositoryRoot& root) const {
  for (const auto& [path, stamp] : files) AWQD_RETURN_IF_ERROR(CheckFile(root, path, stamp));
  for (const auto& [path, before] : tensor_files) {
    auto now = root.ListDirectory(path);
    if (!now.ok() && !IsGone(now.status())) return now.status();
    if (now.ok() && OnlyTensorFiles(*std::move(now)) == before) continue;
    return Invalid(absl::CHexEscape(path),
                   ": tensor files were added or removed while the model was loaded");
  }
  return absl::OkStatus();
}

FolderSnapshot::FolderSnapshot(const RepositoryRoot& root, absl::string_view folder,
                               FilesRead* read)
    : root_(root), folder_(folder), held_(root.Hold(folder)), read_(read) {}

absl::StatusOr<File> FolderSnapshot::OpenFile(absl::string_view relative) const {
  absl::string_view name = relative;
  const bool inside = absl::ConsumePrefix(&name, folder_) && absl::ConsumePrefix(&name, "/");
  absl::StatusOr<File> out = held_.ok() && inside
                                 ? root_.OpenFileIn(*held_, std::string(name), relative)
                                 : root_.OpenFile(relative);
  if (out.ok()) {
    read_->files[std::string(relative)] = out->stamp();
  } else if (absl::IsNotFound(out.status())) {
    read_->files[std::string(relative)] = std::nullopt;
  }
  return out;
}

absl::StatusOr<std::vector<std::string>> FolderSnapshot::ListDirectory(
    absl::string_view relative) const {
  absl::StatusOr<std::vector<std::string>> out = held_.ok() && relative == folder_
                                                     ? root_.ListIn(*held_, relative)
                                                     : root_.ListDirectory(relative);
  if (out.ok()) read_->tensor_files[std::string(relative)] = OnlyTensorFiles(*out);
  return out;
}

FolderState ReadFolderState(const RepositoryRoot& root, absl::string_view path) {
  FolderState out;
  Walk walk(root, &out);
  const std::string folder(path);
  const auto names = root.ListDirectory(folder);
  if (!names.ok()) {
    auto files = FindGguf(root, folder);
    if (!files.ok() || files->empty()) files = std::vector<std::string>{folder};
    for (const std::string& file : *files) walk.File(file, true);
    return out;
  }
  walk.Folder(folder, *names, 0, true);
  if (const size_t at = folder.rfind(kSnapshotsDir); at != std::string::npos) {
    const std::string blobs = absl::StrCat(folder.substr(0, at), "/blobs");
    if (const auto unfinished = root.ListDirectory(blobs); unfinished.ok()) {
      walk.Folder(blobs, *unfinished, kMaxDepth, false);
    }
  }
  return out;
}

}  // namespace awqd::model
