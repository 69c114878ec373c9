// Finding a checkpoint's files and the linears in them.
#include "server/model/checkpoint.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/huge_pages.h"
#include "kernels/base/status.h"
#include "server/model/checkpoint_files.h"
#include "server/model/quant_config.h"

namespace awqd::model {
namespace {

std::pair<absl::string_view, absl::string_view> SplitPath(absl::string_view tensor) {
  const size_t dot = tensor.rfind('.');
  if (dot == tensor.npos) return {"", tensor};
  return {tensor.substr(0, dot), tensor.substr(dot + 1)};
}

bool IsOptional(const Format& format, absl::string_view suffix) {
  return absl::c_linear_search(format.optional_suffixes, suffix);
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const RepositoryRoot& root, absl::string_view name) {
  Checkpoint out;
  out.name_ = std::string(name);
  AWQD_RETURN_IF_ERROR(out.FindConfig(root));
  AWQD_ASSIGN_OR_RETURN(const TensorFiles files, FindTensorFiles(root, name));
  AWQD_RETURN_IF_ERROR(out.OpenFiles(root, files.names));
  AWQD_RETURN_IF_ERROR(out.IndexTensors());
  AWQD_RETURN_IF_ERROR(out.CheckIndex(files.weight_map));
  AWQD_RETURN_IF_ERROR(out.FindLinears());
  return out;
}

absl::Status Checkpoint::FindConfig(const RepositoryRoot& root) {
  AWQD_ASSIGN_OR_RETURN(config_, ReadQuantConfig(root, name_));
  absl::StatusOr<const Format*> format = FindFormat(config_);
  if (!format.ok()) {
    return absl::Status(format.status().code(),
                        absl::StrCat(name_, ": ", format.status().message()));
  }
  format_ = *format;
  return absl::OkStatus();
}

absl::Status Checkpoint::OpenFiles(const RepositoryRoot& root,
                                   const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(name_, "/", name);
    absl::StatusOr<File> file = root.OpenFile(path);
    if (absl::IsNotFound(file.status())) {
      return absl::InvalidArgumentError(absl::StrCat(name_, ": shard ", Quoted(name),
                                                     " is missing, expected every file that ",
                                                     kIndexFile, " names"));
    }
    if (!file.ok()) return file.status();
    AWQD_ASSIGN_OR_RETURN(SafetensorsFile shard, SafetensorsFile::Open(*std::move(file)));
    files_.push_back(std::make_unique<SafetensorsFile>(std::move(shard)));
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::IndexTensors() {
  for (const auto& file : files_) {
    for (const auto& [name, info] : file->tensors()) {
      const auto [it, fresh] = tensors_.emplace(name, TensorLocation{file.get(), &info});
      if (!fresh) {
        return absl::InvalidArgumentError(absl::StrCat(
            "tensor ", Quoted(name), ": got it in both ", it->second.file->file().shown_name(),
            " and ", file->file().shown_name(), ", expected it in one file"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::CheckIndex(const std::map<std::string, std::string>& weight_map) const {
  for (const auto& [tensor, file] : weight_map) {
    const auto it = tensors_.find(tensor);
    const std::string path = absl::StrCat(name_, "/", file);
    if (it != tensors_.end() && it->second.file->file().name() == path) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        name_, "/", kIndexFile, ": tensor ", Quoted(tensor), ": expected in ", Quoted(file),
        it == tensors_.end() ? ", which does not hold it"
                             : absl::StrCat(", found in ", it->second.file->file().shown_name())));
  }
  return absl::OkStatus();
}

// Companions without the tensor that marks a linear: a linear that lost its codes, unless only one
// of several is there, which an unquantised module may well call "scales".
absl::Status Checkpoint::CheckNoOrphan(absl::string_view path, absl::string_view suffix) const {
  const absl::string_view marker = format_->suffixes.front();
  for (absl::string_view needed : format_->suffixes) {
    if (needed == marker || IsOptional(*format_, needed)) continue;
    if (tensors_.count(absl::StrCat(path, ".", needed)) == 0) return absl::OkStatus();
  }
  if (suffix == marker || tensors_.count(absl::StrCat(path, ".", marker)) > 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(name_, ": weight ", Quoted(path), ": tensor \"",
                                                 marker, "\" is missing, though its ", suffix,
                                                 " are there"));
}

absl::StatusOr<LinearLocation> Checkpoint::MakeLinear(absl::string_view path) const {
  LinearLocation out;
  out.path = std::string(path);
  for (absl::string_view suffix : format_->suffixes) {
    const auto it = tensors_.find(absl::StrCat(path, ".", suffix));
    if (it != tensors_.end()) {
      out.tensors.emplace(std::string(suffix), it->second);
      out.bytes += it->second.info->bytes();  // each is at most its file's size: no overflow
    } else if (!IsOptional(*format_, suffix)) {
      return absl::InvalidArgumentError(
          absl::StrCat(name_, ": weight ", Quoted(path), ": tensor \"", suffix,
                       "\" is missing, expected ", absl::StrJoin(format_->suffixes, ", "),
                       " (optional: ", absl::StrJoin(format_->optional_suffixes, ", "), ")"));
    }
  }
  return out;
}

absl::Status Checkpoint::FindLinears() {
  const absl::string_view marker = format_->suffixes.front();
  int64_t used = 0;
  for (const auto& [name, location] : tensors_) {
    const auto [path, suffix] = SplitPath(name);
    if (!absl::c_linear_search(format_->suffixes, suffix)) continue;
    if (IsNotConverted(config_, path)) continue;
    if (suffix != marker) {
      if (!IsOptional(*format_, suffix)) AWQD_RETURN_IF_ERROR(CheckNoOrphan(path, suffix));
      continue;
    }
    if (path.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(location.file->file().shown_name(), ": tensor ", Quoted(name),
                       ": got no module path before it, expected \"<path>.", marker, "\""));
    }
    AWQD_ASSIGN_OR_RETURN(LinearLocation linear, MakeLinear(path));
    used += static_cast<int64_t>(linear.tensors.size());
    linears_.push_back(std::move(linear));
  }
  if (linears_.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(name_, ": got no quantised linear among ",
                                                   tensors_.size(), " tensors, expected some \"",
                                                   marker, "\""));
  }
  ignored_tensors_ = static_cast<int>(static_cast<int64_t>(tensors_.size()) - used);
  absl::c_sort(linears_, [&](const LinearLocation& a, const LinearLocation& b) {
    const TensorLocation& left = a.tensors.find(marker)->second;
    const TensorLocation& right = b.tensors.find(marker)->second;
    return std::tie(left.file->file().name(), left.info->begin) <
           std::tie(right.file->file().name(), right.info->begin);
  });
  return absl::OkStatus();
}

int64_t Checkpoint::total_bytes() const {
  int64_t bytes = 0;
  for (const LinearLocation& linear : linears_) bytes += linear.bytes;
  return bytes;
}

absl::StatusOr<CanonicalWeight> Checkpoint::Read(const LinearLocation& linear,
                                                 std::vector<uint8_t>* scratch) const {
  if (static_cast<int64_t>(scratch->size()) < linear.bytes) {
    *scratch = {};  // first free, then allocate
    scratch->reserve(linear.bytes);
    AdviseHugePages(scratch->data(), linear.bytes);
    scratch->resize(linear.bytes);
  }
  LinearTensors tensors;
  int64_t at = 0;
  for (const auto& [suffix, location] : linear.tensors) {
    const auto bytes = absl::MakeSpan(*scratch).subspan(at, location.info->bytes());
    absl::Status status = location.file->Read(*location.info, bytes);
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(status.message(), " (tensor ",
                                       Quoted(absl::StrCat(linear.path, ".", suffix)), ")"));
    }
    tensors.emplace(suffix, TensorView{location.info->dtype, location.info->shape, bytes});
    at += location.info->bytes();
  }
  absl::StatusOr<CanonicalWeight> out = format_->decode(config_, tensors);
  if (out.ok()) return out;
  const TensorLocation& marker = linear.tensors.find(format_->suffixes.front())->second;
  return absl::Status(out.status().code(),
                      absl::StrCat(marker.file->file().shown_name(), ": weight ",
                                   Quoted(linear.path), ": ", out.status().message()));
}

absl::Status Checkpoint::CheckUnchanged(const RepositoryRoot& root) const {
  for (const auto& file : files_) {
    const absl::StatusOr<File> now = root.OpenFile(file->file().name());
    if (!now.ok() || !now->SameFileAs(file->file())) {
      return absl::InvalidArgumentError(
          absl::StrCat(file->file().shown_name(), ": the file was replaced while it was loaded"));
    }
    AWQD_RETURN_IF_ERROR(file->file().CheckUnchanged());
  }
  return absl::OkStatus();
}

}  // namespace awqd::model
