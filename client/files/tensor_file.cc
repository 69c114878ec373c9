// Incremental tensor files: header first, data as it comes, a rename at the end.
#include "client/files/tensor_file.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/files/npy.h"
#include "kernels/base/status.h"
#include "nlohmann/json.hpp"

namespace awqd::client {
namespace {

// "F16", "BF16", "F32", "I8", "U8", "I32".
std::string SafetensorsType(DType dtype) {
  return absl::StrReplaceAll(Name(dtype), {{"FP", "F"}, {"UINT", "U"}, {"INT", "I"}});
}

std::string PartialName(const std::string& path) {
  const size_t slash = path.rfind('/');
  const size_t base = slash == std::string::npos ? 0 : slash + 1;
  return absl::StrCat(path.substr(0, base), ".", path.substr(base), ".partial-", getpid());
}

// The 8-byte length and the JSON header, padded with spaces to a multiple of 8.
std::string MakeSafetensorsHeader(absl::string_view tensor_name, DType dtype,
                                  const std::vector<int64_t>& shape) {
  int64_t bytes = SizeOf(dtype);
  for (const int64_t dim : shape) bytes *= dim;
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"producer", "awqctl"}};
  header[std::string(tensor_name)] = {
      {"dtype", SafetensorsType(dtype)}, {"shape", shape}, {"data_offsets", {int64_t{0}, bytes}}};
  // `replace`: a name that is not UTF-8 must not throw.
  std::string json = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  json.resize((json.size() + 7) / 8 * 8, ' ');
  const uint64_t length = json.size();
  std::string prefix(sizeof(length), '\0');
  std::memcpy(prefix.data(), &length, sizeof(length));
  return prefix + json;
}

}  // namespace

absl::StatusOr<TensorFileFormat> TensorFileFormatOf(absl::string_view path, DType dtype) {
  if (absl::EndsWith(path, ".safetensors")) return TensorFileFormat::kSafetensors;
  if (!absl::EndsWith(path, ".npy")) {
    return Invalid("output: got '", path, "', expected a name in .npy or .safetensors");
  }
  if (absl::StatusOr<NpyType> type = NpyTypeOf(dtype); !type.ok()) return type.status();
  return TensorFileFormat::kNpy;
}

absl::StatusOr<std::unique_ptr<TensorFileWriter>> TensorFileWriter::Create(
    const std::string& path, absl::string_view tensor_name, DType dtype,
    const std::vector<int64_t>& shape) {
  AWQD_ASSIGN_OR_RETURN(const TensorFileFormat format, TensorFileFormatOf(path, dtype));
  AWQD_ASSIGN_OR_RETURN(const int64_t count, ElementCount(shape));
  int64_t bytes = 0;
  if (__builtin_mul_overflow(count, SizeOf(dtype), &bytes)) {
    return Invalid("shape: got ", ShapeString(shape), ", past 2^63 bytes");
  }
  const std::string header = format == TensorFileFormat::kNpy
                                 ? MakeNpyHeader(*NpyTypeOf(dtype), shape)
                                 : MakeSafetensorsHeader(tensor_name, dtype, shape);
  std::string partial = PartialName(path);
  unlink(partial.c_str());  // of a killed process that had the same id
  AWQD_ASSIGN_OR_RETURN(auto file, OutputFile::Create(partial, path));
  std::unique_ptr<TensorFileWriter> writer(
      new TensorFileWriter(path, std::move(partial), std::move(file), bytes));
  AWQD_RETURN_IF_ERROR(writer->file_->Append(header));
  return writer;
}

TensorFileWriter::TensorFileWriter(std::string path, std::string partial,
                                   std::unique_ptr<OutputFile> file, int64_t remaining)
    : path_(std::move(path)),
      partial_(std::move(partial)),
      on_signal_(partial_),
      file_(std::move(file)),
      remaining_(remaining) {}

TensorFileWriter::~TensorFileWriter() {
  if (file_ != nullptr) unlink(partial_.c_str());
}

absl::Status TensorFileWriter::Append(absl::string_view bytes) {
  if (static_cast<uint64_t>(remaining_) < bytes.size()) {
    return absl::FailedPreconditionError(absl::StrCat(
        path_, ": got ", bytes.size(), " bytes where ", remaining_, " were left to write"));
  }
  remaining_ -= static_cast<int64_t>(bytes.size());
  return file_->Append(bytes);
}

absl::Status TensorFileWriter::Commit() {
  if (remaining_ != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, ": ", remaining_, " bytes of the tensor were not written"));
  }
  AWQD_RETURN_IF_ERROR(file_->Close());
  if (rename(partial_.c_str(), path_.c_str()) != 0) return FileError("replace", path_);
  file_ = nullptr;  // the file stays
  on_signal_ = RemoveOnSignal();
  return absl::OkStatus();
}

}  // namespace awqd::client
