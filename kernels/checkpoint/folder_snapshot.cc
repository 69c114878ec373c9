// Opening in the folder that is held, and comparing with what a path leads to later.
#include "kernels/checkpoint/folder_snapshot.h"

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"

namespace awqd::model {
namespace {

// Other files of a folder may come and go.
std::vector<std::string> OnlyTensorFiles(std::vector<std::string> names) {
  std::erase_if(names, [](absl::string_view name) {
    return !absl::EndsWith(name, ".safetensors") && !absl::EndsWith(name, ".gguf");
  });
  return names;
}

// Whether a second look tells that a file is no longer what it was, rather than that it could not
// be looked at.
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

}  // namespace

absl::Status FilesRead::CheckUnchanged(const RepositoryRoot& root) const {
  for (const auto& [path, stamp] : files) AWQD_RETURN_IF_ERROR(CheckFile(root, path, stamp));
  for (const auto& [path, before] : tensor_files) {
    auto now = root.ListDirectory(path);
    if (!now.ok() && !IsGone(now.status())) return now.status();
    if (now.ok() && OnlyTensorFiles(*std::move(now)) == before) continue;
    return Invalid(absl::CHexEscape(path),
                   ": files of tensors came or went while the model was loaded");
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

}  // namespace awqd::model
