// Opening a folder and the headers of its tensor files.
#include "client/tools/folder.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint_files.h"
#include "kernels/checkpoint/gguf.h"

namespace awqd::tools {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxTextBytes = 4 << 20;
constexpr int64_t kPart = 8 << 20;

using ReadBytes = absl::FunctionRef<absl::Status(int64_t at, absl::Span<uint8_t> to)>;

absl::StatusOr<bool> SameParts(int64_t bytes, ReadBytes a, ReadBytes b) {
  std::vector<uint8_t> left(std::min(kPart, bytes)), right(left.size());
  for (int64_t at = 0; at < bytes; at += kPart) {
    const int64_t count = std::min(kPart, bytes - at);
    AWQD_RETURN_IF_ERROR(a(at, absl::MakeSpan(left).first(count)));
    AWQD_RETURN_IF_ERROR(b(at, absl::MakeSpan(right).first(count)));
    if (std::memcmp(left.data(), right.data(), count) != 0) return false;
  }
  return true;
}

}  // namespace

std::string Folder::PathOf(absl::string_view file) const { return absl::StrCat(name, "/", file); }

absl::StatusOr<Folder> OpenFolder(const std::string& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  if (error) {
    return absl::NotFoundError(absl::StrCat(Quoted(path, 1024), ": ", error.message()));
  }
  const bool is_model = fs::is_directory(real, error) || real.extension() == ".gguf";
  if (!is_model || !real.has_relative_path()) {
    return Invalid(Quoted(path, 1024), ": expected a model's directory, or a .gguf file");
  }
  const fs::path above = real.parent_path();
  const bool snapshot = above.filename() == "snapshots";
  const fs::path root = snapshot ? above.parent_path() : above;
  absl::string_view shown = path;
  while (shown.size() > 1 && absl::ConsumeSuffix(&shown, "/")) {
  }
  Folder out = {.path = std::string(shown), .name = real.lexically_relative(root).string()};
  AWQD_ASSIGN_OR_RETURN(out.root, model::RepositoryRoot::Open(root.string()));
  return out;
}

absl::StatusOr<std::string> ReadText(const Folder& folder, absl::string_view file) {
  AWQD_ASSIGN_OR_RETURN(const model::File open, folder.root.OpenFile(folder.PathOf(file)));
  if (open.size() > kMaxTextBytes) {
    return Invalid(open.shown_name(), ": got ", open.size(), " bytes, expected at most ",
                   kMaxTextBytes);
  }
  std::string text(open.size(), '\0');
  AWQD_RETURN_IF_ERROR(
      open.ReadAt(0, absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size())));
  return text;
}

absl::StatusOr<Tensors> Tensors::Open(const Folder& folder) {
  Tensors out;
  AWQD_ASSIGN_OR_RETURN(const std::string gguf, model::FindGguf(folder.root, folder.name));
  if (!gguf.empty()) {
    out.gguf_ = true;
    AWQD_ASSIGN_OR_RETURN(model::File file, folder.root.OpenFile(gguf));
    AWQD_ASSIGN_OR_RETURN(model::GgufFile open, model::OpenGguf(std::move(file)));
    AWQD_RETURN_IF_ERROR(
        out.AddFile(std::make_shared<const model::TensorFile>(std::move(open.tensors))));
    return out;
  }
  AWQD_ASSIGN_OR_RETURN(model::TensorFiles opened,
                        model::OpenTensorFiles(folder.root, folder.name));
  for (auto& file : opened.files) AWQD_RETURN_IF_ERROR(out.AddFile(std::move(file)));
  return out;
}

absl::StatusOr<Tensors> Tensors::FromCheckpoint(const model::Checkpoint& checkpoint) {
  Tensors out;
  out.gguf_ = &checkpoint.format() == &kGgufFormat;
  for (const auto& file : checkpoint.files()) AWQD_RETURN_IF_ERROR(out.AddFile(file));
  return out;
}

absl::Status Tensors::AddFile(std::shared_ptr<const model::TensorFile> file) {
  names_.push_back(fs::path(file->file().name()).filename().string());
  files_.push_back(std::move(file));
  for (const auto& [tensor, info] : files_.back()->tensors()) {
    const model::TensorLocation place = {files_.back().get(), &info};
    if (tensors_.emplace(tensor, place).second) continue;
    return Invalid("tensor ", Quoted(tensor), ": is in two files");
  }
  return absl::OkStatus();
}

const model::TensorLocation* Tensors::Find(absl::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

std::vector<std::string> Tensors::InOrder() const {
  std::vector<const Map::value_type*> places;
  for (const auto& entry : tensors_) places.push_back(&entry);
  absl::c_sort(places, [](const auto* a, const auto* b) {
    return std::tie(a->second.file->file().name(), a->second.info->begin, a->first) <
           std::tie(b->second.file->file().name(), b->second.info->begin, b->first);
  });
  std::vector<std::string> out;
  for (const auto* place : places) out.emplace_back(place->first);
  return out;
}

int64_t Tensors::total_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, place] : tensors_) bytes += place.info->bytes();
  return bytes;
}

absl::Status ReadPart(const model::TensorLocation& place, int64_t at, absl::Span<uint8_t> out) {
  model::TensorInfo part = *place.info;
  part.begin += at;
  part.end = part.begin + static_cast<int64_t>(out.size());
  return place.file->Read(part, out);
}

absl::StatusOr<bool> SameBytes(const model::TensorLocation& a, const model::TensorLocation& b) {
  if (a.info->dtype != b.info->dtype || a.info->shape != b.info->shape) return false;
  return SameParts(
      a.info->bytes(), [&](int64_t at, absl::Span<uint8_t> to) { return ReadPart(a, at, to); },
      [&](int64_t at, absl::Span<uint8_t> to) { return ReadPart(b, at, to); });
}

absl::StatusOr<bool> SameBytes(const model::File& a, const model::File& b) {
  if (a.size() != b.size()) return false;
  return SameParts(
      a.size(), [&](int64_t at, absl::Span<uint8_t> to) { return a.ReadAt(at, to); },
      [&](int64_t at, absl::Span<uint8_t> to) { return b.ReadAt(at, to); });
}

absl::Status Tensors::CheckUnchanged() const {
  for (const auto& file : files_) AWQD_RETURN_IF_ERROR(file->file().CheckUnchanged());
  return absl::OkStatus();
}

}  // namespace awqd::tools
