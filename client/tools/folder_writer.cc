// Safetensors files in a directory that has another name until it is complete.
#include "client/tools/folder_writer.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "client/tools/elements.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/containers/shard_index.h"
#include "kernels/checkpoint/model_folder.h"

namespace awqd::tools {
namespace {

constexpr int64_t kPart = 8 << 20;
constexpr int64_t kAlign = 8;
constexpr int64_t kPrefix = 8;  // the header's length
// Bytes that a tensor's entry takes beside its name: dtype, at most 8 dimensions, two offsets, and
// punctuation.
constexpr int64_t kEntry = 320;
constexpr int64_t kFrame = 64;  // braces and metadata

std::string Dump(const nlohmann::ordered_json& json) {
  // `replace`: a name that is not UTF-8 must not throw; a checked checkpoint has none.
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Takes types of a byte or more only.
int64_t ElementBytes(const NewTensor& tensor) {
  int64_t elements = 1;
  for (const int64_t dim : tensor.shape) elements *= dim;
  return elements == 0 ? 1 : tensor.bytes / elements;
}

// Held while a run writes it, so that the next one can tell a killed run from a running one.
bool Lock(int fd) { return flock(fd, LOCK_EX | LOCK_NB) == 0; }

absl::Status WhyThere(const std::string& partial) {
  const UniqueFd fd(open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.ok() && !Lock(fd.get())) {
    return absl::AlreadyExistsError(absl::StrCat(partial, ": another run is writing it"));
  }
  return absl::AlreadyExistsError(
      absl::StrCat(partial, " exists, left by a run that was killed; remove it first"));
}

}  // namespace

int64_t SafetensorsWriter::HeaderBytes(absl::string_view name) {
  return static_cast<int64_t>(Dump(std::string(name)).size()) + kEntry;
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, int64_t header_bytes) {
  header_bytes = RoundUp(header_bytes + kFrame, kAlign);
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<client::OutputFile> file, client::OutputFile::Create(path));
  AWQD_RETURN_IF_ERROR(file->Append(std::string(kPrefix + header_bytes, ' ')));
  std::unique_ptr<SafetensorsWriter> out(
      new SafetensorsWriter(path, std::move(file), header_bytes));
  out->header_["__metadata__"] = {{"format", "pt"}};  // which transformers asks for
  return out;
}

absl::Status SafetensorsWriter::AddTensor(NewTensor tensor) {
  if (tensor.bytes % kAlign == 0) return Write(tensor);
  last_.push_back(std::move(tensor));
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Write(const NewTensor& tensor) {
  int64_t step = std::max(tensor.unit, kPart / tensor.unit * tensor.unit);
  // Dense weights are read eight columns at a time.
  if (step >= 8 * tensor.unit) step = step / (8 * tensor.unit) * (8 * tensor.unit);
  part_.resize(std::min(step, tensor.bytes));
  for (int64_t at = 0; at < tensor.bytes; at += step) {
    const auto part = absl::MakeSpan(part_).first(std::min(step, tensor.bytes - at));
    constexpr int64_t kLeast = 512 << 10;  // for a thread of its own
    AWQD_RETURN_IF_ERROR(RunHalves(0, static_cast<int64_t>(part.size()), 8 * tensor.unit, kLeast,
                                   [&](int64_t begin, int64_t end) {
                                     return tensor.read(at + begin,
                                                        part.subspan(begin, end - begin));
                                   }));
    AWQD_RETURN_IF_ERROR(file_->Append(absl::Span<const uint8_t>(part)));
  }
  header_[tensor.name] = {{"dtype", tensor.dtype},
                          {"shape", tensor.shape},
                          {"data_offsets", {data_bytes_, data_bytes_ + tensor.bytes}}};
  data_bytes_ += tensor.bytes;
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  absl::c_stable_sort(last_, [](const NewTensor& a, const NewTensor& b) {
    return ElementBytes(a) > ElementBytes(b);
  });
  for (const NewTensor& tensor : last_) AWQD_RETURN_IF_ERROR(Write(tensor));
  last_.clear();
  const std::string text = Dump(header_);
  if (static_cast<int64_t>(text.size()) > header_bytes_) {
    return absl::InternalError(absl::StrCat(path_, ": the header takes ", text.size(), " bytes, ",
                                            header_bytes_, " were kept for it"));
  }
  const auto length = static_cast<uint64_t>(header_bytes_);
  char prefix[kPrefix];
  std::memcpy(prefix, &length, sizeof(prefix));
  AWQD_RETURN_IF_ERROR(file_->Overwrite(0, absl::string_view(prefix, sizeof(prefix))));
  AWQD_RETURN_IF_ERROR(file_->Overwrite(kPrefix, text));
  return file_->Close();
}

FolderWriter::FolderWriter(std::string path, const Guard& guard, bool single_file)
    : path_(std::move(path)),
      partial_(path_ + ".partial"),
      guard_(guard),
      single_file_(single_file) {}

absl::StatusOr<std::unique_ptr<FolderWriter>> FolderWriter::Create(const std::string& path,
                                                                   const Guard& guard,
                                                                   bool single_file) {
  std::unique_ptr<FolderWriter> out(
      new FolderWriter(std::string(model::WithoutSlashes(path)), guard, single_file));
  std::error_code error;
  if (std::filesystem::exists(std::filesystem::symlink_status(out->path_, error))) {
    return absl::AlreadyExistsError(absl::StrCat(out->path_, " exists"));
  }
  AWQD_RETURN_IF_ERROR(out->Make());
  return out;
}

absl::Status FolderWriter::Make() {
  // Named before it is there, so that no signal falls in between.
  if (guard_) guarded_.push_back(guard_(partial_));
  if (mkdir(partial_.c_str(), 0777) != 0) {
    return errno == EEXIST ? WhyThere(partial_) : client::FileError("make", partial_);
  }
  made_ = true;
  lock_ = UniqueFd(open(partial_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!lock_.ok() || !Lock(lock_.get())) return client::FileError("lock", partial_);
  return absl::OkStatus();
}

FolderWriter::~FolderWriter() {
  if (!made_) return;
  shard_.reset();
  for (const std::string& name : files_) unlink(absl::StrCat(partial_, "/", name).c_str());
  rmdir(partial_.c_str());
}

std::string FolderWriter::NewFile(const std::string& name) {
  files_.insert(name);
  std::string path = absl::StrCat(partial_, "/", name);
  if (guard_) guarded_.push_back(guard_(path));
  return path;
}

void FolderWriter::BeginShard(const std::string& name, int64_t header_bytes) {
  shard_name_ = name;
  header_bytes_ = header_bytes;
}

absl::Status FolderWriter::AddTensor(NewTensor tensor) {
  if (!weight_map_.emplace(tensor.name, shard_name_).second) {
    return Invalid("tensor ", Quoted(tensor.name),
                   ": occurs twice: another linear makes a tensor of that name");
  }
  if (shard_ == nullptr) {
    AWQD_ASSIGN_OR_RETURN(shard_, SafetensorsWriter::Create(NewFile(shard_name_), header_bytes_));
    shards_.insert(shard_name_);
  }
  tensor_bytes_ += tensor.bytes;
  return shard_->AddTensor(std::move(tensor));
}

absl::Status FolderWriter::EndShard() {
  if (shard_ == nullptr) return absl::OkStatus();
  const std::unique_ptr<SafetensorsWriter> shard = std::move(shard_);
  return shard->Finish();
}

absl::Status FolderWriter::WriteIndex() {
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", tensor_bytes_}}},
                                        {"weight_map", weight_map_}};
  return WriteText(std::string(model::kIndexFile),
                   index.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

absl::StatusOr<std::unique_ptr<client::OutputFile>> FolderWriter::CreateFile(
    const std::string& name) {
  return client::OutputFile::Create(NewFile(name));
}

absl::Status FolderWriter::WriteText(const std::string& name, absl::string_view text) {
  AWQD_ASSIGN_OR_RETURN(const auto file, CreateFile(name));
  AWQD_RETURN_IF_ERROR(file->Append(text));
  return file->Close();
}

absl::Status FolderWriter::Copy(const model::File& from, const std::string& name) {
  AWQD_ASSIGN_OR_RETURN(const auto file, CreateFile(name));
  std::vector<uint8_t> part(std::min(kPart, from.size()));
  for (int64_t at = 0; at < from.size(); at += kPart) {
    const auto bytes = absl::MakeSpan(part).first(std::min(kPart, from.size() - at));
    AWQD_RETURN_IF_ERROR(from.ReadAt(at, bytes));
    AWQD_RETURN_IF_ERROR(file->Append(absl::Span<const uint8_t>(bytes)));
  }
  return file->Close();
}

absl::Status FolderWriter::Commit() {
  fsync(lock_.get());
  const std::string from = single_file_ ? absl::StrCat(partial_, "/", *files_.begin()) : partial_;
  // Never in the place of a folder that another run made meanwhile.
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, path_.c_str(), RENAME_NOREPLACE) != 0) {
    // Some file systems cannot promise that.
    const bool there = errno == EEXIST;
    if (there || rename(from.c_str(), path_.c_str()) != 0) return client::FileError("make", path_);
  }
  if (single_file_) rmdir(partial_.c_str());
  made_ = false;  // nothing is removed any more
  guarded_.clear();
  return absl::OkStatus();
}

}  // namespace awqd::tools
