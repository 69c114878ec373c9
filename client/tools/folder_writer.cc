// A directory under another name until it is complete.
#include "client/tools/folder_writer.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint_files.h"

namespace awqd::tools {
namespace {

constexpr int64_t kPart = 8 << 20;

std::string WithoutSlash(const std::string& path) {
  absl::string_view out = path;
  while (out.size() > 1 && absl::ConsumeSuffix(&out, "/")) {
  }
  return std::string(out);
}

// Held while a run writes it, so that the next one can tell a killed run from a running one.
bool Lock(int fd) { return flock(fd, LOCK_EX | LOCK_NB) == 0; }

absl::Status WhyThere(const std::string& partial) {
  const UniqueFd fd(open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.ok() && !Lock(fd.get())) {
    return absl::AlreadyExistsError(absl::StrCat(partial, ": another run is writing it"));
  }
  return absl::AlreadyExistsError(
      absl::StrCat(partial, ": it is there, left by a run that was killed; remove it first"));
}

}  // namespace

FolderWriter::FolderWriter(std::string path, const Guard& guard)
    : path_(std::move(path)), partial_(path_ + ".partial"), guard_(guard) {}

absl::StatusOr<std::unique_ptr<FolderWriter>> FolderWriter::Create(const std::string& path,
                                                                   const Guard& guard) {
  std::unique_ptr<FolderWriter> out(new FolderWriter(WithoutSlash(path), guard));
  std::error_code error;
  if (std::filesystem::exists(std::filesystem::symlink_status(out->path_, error))) {
    return absl::AlreadyExistsError(
        absl::StrCat(out->path_, ": it is there already, expected a name that is free"));
  }
  AWQD_RETURN_IF_ERROR(out->Make());
  return out;
}

absl::Status FolderWriter::Make() {
  // Named before it is there, so that no signal falls in between.
  if (guard_) guarded_.push_back(guard_(partial_));
  if (mkdir(partial_.c_str(), 0777) != 0) {
    return errno == EEXIST ? WhyThere(partial_) : PathError("make", partial_);
  }
  made_ = true;
  lock_ = UniqueFd(open(partial_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!lock_.ok() || !Lock(lock_.get())) return PathError("lock", partial_);
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

absl::Status FolderWriter::BeginShard(const std::string& name, int64_t header_bytes) {
  shard_name_ = name;
  header_bytes_ = header_bytes;
  return absl::OkStatus();
}

absl::Status FolderWriter::Add(NewTensor tensor) {
  if (!weight_map_.emplace(tensor.name, shard_name_).second) {
    return model::Invalid("tensor ", model::Quoted(tensor.name),
                          ": got it twice: the folder has a tensor of that name already");
  }
  if (shard_ == nullptr) {
    AWQD_ASSIGN_OR_RETURN(shard_, SafetensorsWriter::Create(NewFile(shard_name_), header_bytes_));
    shards_.insert(shard_name_);
  }
  tensor_bytes_ += tensor.bytes;
  return shard_->Add(std::move(tensor));
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

absl::Status FolderWriter::WriteText(const std::string& name, absl::string_view text) {
  AWQD_ASSIGN_OR_RETURN(const auto file, OutputFile::Create(NewFile(name)));
  AWQD_RETURN_IF_ERROR(file->Append(text));
  return file->Close();
}

absl::Status FolderWriter::Copy(const model::File& from, const std::string& name) {
  AWQD_ASSIGN_OR_RETURN(const auto file, OutputFile::Create(NewFile(name)));
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
  // Never in the place of a folder that another run made meanwhile.
  if (renameat2(AT_FDCWD, partial_.c_str(), AT_FDCWD, path_.c_str(), RENAME_NOREPLACE) != 0) {
    // Some file systems cannot promise that.
    const bool there = errno == EEXIST;
    if (there || rename(partial_.c_str(), path_.c_str()) != 0) return PathError("make", path_);
  }
  made_ = false;  // nothing is removed any more
  guarded_.clear();
  return absl::OkStatus();
}

}  // namespace awqd::tools
