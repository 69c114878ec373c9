// Opening a checkpoint's files, and reading linears of them.
#include "kernels/checkpoint/checkpoint.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/huge_pages.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint_files.h"
#include "kernels/checkpoint/folder_snapshot.h"
#include "kernels/checkpoint/gguf.h"
#include "kernels/checkpoint/tensor_names.h"

namespace awqd::model {
namespace {

// At least so many bytes, of any contents.
void Reserve(int64_t bytes, std::vector<uint8_t>* scratch) {
  if (static_cast<int64_t>(scratch->size()) >= bytes) return;
  *scratch = {};  // first free, then allocate
  scratch->reserve(bytes);
  AdviseHugePages(scratch->data(), bytes);
  scratch->resize(bytes);
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const RepositoryRoot& root, absl::string_view name,
                                            const std::atomic<bool>* cancelled) {
  Checkpoint out;
  out.name_ = std::string(name);
  out.cancelled_ = cancelled;
  const FolderSnapshot folder(root, name, &out.read_);
  AWQD_ASSIGN_OR_RETURN(const std::string gguf, FindGguf(folder, name));
  if (gguf.empty()) {
    AWQD_RETURN_IF_ERROR(out.FindConfig(folder));
    AWQD_RETURN_IF_ERROR(out.OpenFiles(folder));
  } else {
    AWQD_RETURN_IF_ERROR(out.OpenGgufFile(folder, gguf));
  }
  AWQD_RETURN_IF_ERROR(out.FindLinears());
  return out;
}

absl::Status Checkpoint::FindConfig(const FileSource& root) {
  AWQD_ASSIGN_OR_RETURN(const QuantSettings config, ReadQuantSettings(root, name_));
  absl::StatusOr<FoundFormat> found = FindFormat(config.settings);
  if (!found.ok()) return Prefixed(config.place, found.status());
  found_ = *std::move(found);
  absl::StatusOr<LinearRules> rules = LinearRules::Make(found_.config, cancelled_);
  if (!rules.ok()) return Prefixed(config.place, rules.status());
  rules_ = *std::move(rules);
  return absl::OkStatus();
}

absl::Status Checkpoint::OpenFiles(const FileSource& root) {
  AWQD_ASSIGN_OR_RETURN(TensorFiles opened, OpenTensorFiles(root, name_, cancelled_));
  for (auto& file : opened.files) AWQD_RETURN_IF_ERROR(AddFile(std::move(file)));
  return opened.index ? CheckIndex(*opened.index) : absl::OkStatus();
}

absl::Status Checkpoint::OpenGgufFile(const FileSource& root, const std::string& path) {
  AWQD_ASSIGN_OR_RETURN(File file, root.OpenFile(path));
  AWQD_ASSIGN_OR_RETURN(GgufFile gguf, OpenGguf(std::move(file), {.cancelled = cancelled_}));
  found_ = FormatOfGguf(gguf);
  AWQD_ASSIGN_OR_RETURN(rules_, LinearRules::Make(found_.config, cancelled_));
  return AddFile(std::make_shared<const TensorFile>(std::move(gguf.tensors)));
}

absl::Status Checkpoint::AddFile(std::shared_ptr<const TensorFile> opened) {
  const auto& file = files_.emplace_back(std::move(opened));
  for (const auto& [name, info] : file->tensors()) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled_));
    const auto [it, fresh] = tensors_.emplace(name, TensorLocation{file.get(), &info});
    if (!fresh) {
      return Invalid("tensor ", Quoted(name), ": is in two files, ",
                     it->second.file->file().shown_name(), " and ", file->file().shown_name());
    }
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::CheckIndex(const ShardIndex& index) const {
  for (size_t i = 0; i < index.size(); ++i) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled_));
    const auto [tensor, file] = index[i];
    const auto it = tensors_.find(tensor);
    const std::string path = absl::StrCat(name_, "/", file);
    if (it != tensors_.end() && it->second.file->file().name() == path) continue;
    return Invalid(
        name_, "/", kIndexFile, ": tensor ", Quoted(tensor), ": expected in ", Quoted(file),
        it == tensors_.end() ? ", which does not hold it"
                             : absl::StrCat(", found in ", it->second.file->file().shown_name()));
  }
  return absl::OkStatus();
}

int64_t Checkpoint::total_bytes() const {
  int64_t bytes = 0;
  for (const LinearLocation& linear : linears_) bytes += linear.bytes;
  return bytes;
}

absl::StatusOr<HostWeight> Checkpoint::Read(const LinearLocation& linear,
                                            std::vector<uint8_t>* scratch) const {
  return Decode(linear, /*codes=*/true, scratch);
}

absl::StatusOr<HostWeight> Checkpoint::Describe(const LinearLocation& linear,
                                                std::vector<uint8_t>* scratch) const {
  return Decode(linear, /*codes=*/false, scratch);
}

absl::StatusOr<HostWeight> Checkpoint::Decode(const LinearLocation& linear, bool codes,
                                              std::vector<uint8_t>* scratch) const {
  const Format& format = *linear.rule->format;
  Reserve(codes ? linear.bytes : linear.bytes - linear.codes().info->bytes(), scratch);
  // What the file calls it, which is not what a slice is called.
  const std::string& stored = linear.slice_of.empty() ? linear.path : linear.slice_of;
  LinearTensors tensors;
  int64_t at = 0;
  for (const auto& [suffix, location] : linear.tensors) {
    const int64_t size = location.info->bytes();
    TensorView& view = tensors[suffix];
    view = {location.info->dtype, location.info->shape, {}, linear.experts};
    if (!codes && suffix == format.suffixes.front()) {
      view.bytes = absl::Span<const uint8_t>(nullptr, size);
      continue;
    }
    const auto bytes = absl::MakeSpan(*scratch).subspan(at, size);
    const absl::Status status = location.file->Read(*location.info, bytes, cancelled_);
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(status.message(), " (tensor ",
                                       Quoted(TensorName(format, stored, suffix)), ")"));
    }
    view.bytes = bytes;
    at += size;
  }
  absl::StatusOr<HostWeight> out = format.decode(linear.rule->settings, tensors);
  if (out.ok()) return out;
  return Prefixed(
      absl::StrCat(linear.codes().file->file().shown_name(), ": weight ", Quoted(linear.path),
                   linear.slice_of.empty()
                       ? ""
                       : absl::StrCat(" (a slice of ", Quoted(linear.slice_of), ")")),
      out.status());
}

absl::Status Checkpoint::CheckUnchanged(const RepositoryRoot& root) const {
  return read_.CheckUnchanged(root);
}

}  // namespace awqd::model
