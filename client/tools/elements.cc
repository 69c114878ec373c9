// Rows of codes, zeros and scales as FP32; one reading thread a linear.
#include "client/tools/elements.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/process_limits.h"
#include "kernels/base/status.h"
#include "kernels/exact.h"

namespace awqd::tools {
namespace {

// `count` codes of `place` bits each.
void Unpack(const uint8_t* from, int place, int64_t count, uint8_t* to) {
  if (place == 8) {
    std::memcpy(to, from, count);
    return;
  }
  const int in_byte = 8 / place;
  const uint8_t mask = static_cast<uint8_t>((1 << place) - 1);
  const int64_t whole = count / in_byte;
  for (int64_t i = 0; i < whole; ++i) {
    for (int j = 0; j < in_byte; ++j) to[i * in_byte + j] = from[i] >> (j * place) & mask;
  }
  for (int64_t i = whole * in_byte; i < count; ++i) {
    to[i] = from[i / in_byte] >> (i % in_byte * place) & mask;
  }
}

// The bias of a dense linear.
absl::StatusOr<std::vector<float>> ReadBias(const Model& model, absl::string_view path, int64_t n) {
  std::vector<float> out;
  const model::TensorLocation* const place = model.tensors().Find(absl::StrCat(path, ".bias"));
  if (place == nullptr || !IsFloatType(place->info->dtype) ||
      place->info->shape != std::vector<int64_t>{n}) {
    return out;
  }
  AWQD_RETURN_IF_ERROR(CheckRoom(absl::StrCat("bias of ", Quoted(path)), 1, place->info->bytes()));
  std::vector<uint8_t> bytes(place->info->bytes());
  AWQD_RETURN_IF_ERROR(place->file->Read(*place->info, absl::MakeSpan(bytes)));
  for (int64_t i = 0; i < n; ++i) {
    out.push_back(LoadElement(bytes.data(), FloatTypeNamed(place->info->dtype), i));
  }
  return out;
}

}  // namespace

RowReader::RowReader(const HostWeight* weight, int64_t begin, int64_t end)
    : weight_(weight),
      begin_(begin),
      count_(end - begin),
      row_of_(weight->order.size()),
      zeros_(count_),
      scales_(count_),
      codes_(count_) {
  for (size_t i = 0; i < row_of_.size(); ++i) row_of_[weight->order[i]] = static_cast<int32_t>(i);
  if (weight->scheme.is_integer()) return;
  for (int code = 0; code < 1 << weight->scheme.bits; ++code) {
    values_.push_back(DecodeCode(weight->scheme.code, weight->table.data(), code));
  }
}

void RowReader::ReadCodes(int64_t k, uint8_t* to) const {
  const int64_t at = StoredRow(k) * weight_->row_bytes() + begin_ * weight_->code_bits() / 8;
  Unpack(weight_->codes.data() + at, weight_->code_bits(), count_, to);
}

void RowReader::OpenGroup(int64_t group) {
  group_ = group;
  if (weight_->scheme.code == CodeKind::kVector) {
    blocks_.resize(count_);
    const auto decode = InfoOf(weight_->scheme.vector).decode;
    for (int64_t i = 0; i < count_; ++i) {
      decode(weight_->Block(group * kVectorBlock, begin_ + i), &blocks_[i]);
    }
    return;
  }
  if (weight_->scheme.code == CodeKind::kTrellis) return OpenTrellis(group);
  for (int64_t i = 0; i < count_; ++i) {
    zeros_[i] = ZeroOf(*weight_, group, begin_ + i);
    scales_[i] = weight_->Scale(group, begin_ + i);
  }
}

void RowReader::OpenTrellis(int64_t group) {
  constexpr int64_t kColumns = kTrellisColumns;
  float block[kTrellisTile * kColumns];
  trellis_.resize(kTrellisTile * count_);
  for (int64_t first = begin_ / kColumns * kColumns; first < begin_ + count_; first += kColumns) {
    DecodeTrellis(weight_->scheme, weight_->Block(group * kTrellisTile, first), block);
    const int64_t end = std::min(first + kColumns, begin_ + count_);
    for (int64_t col = std::max(first, begin_); col < end; ++col) {
      for (int64_t row = 0; row < kTrellisTile; ++row) {
        trellis_[row * count_ + col - begin_] = block[(col - first) * kTrellisTile + row];
      }
    }
  }
}

void RowReader::Read(int64_t k, float* to) {
  if (const int64_t size = weight_->hadamard.size; size == 0) {
    ReadStored(k, to);
  } else {
    if (block_ != k / size) {
      block_ = k / size;
      transformed_.resize(size * count_);
      for (int64_t i = 0; i < size; ++i) ReadStored(block_ * size + i, &transformed_[i * count_]);
      TransformBlock(weight_->hadamard, transformed_.data(), count_);
    }
    std::copy_n(&transformed_[k % size * count_], count_, to);
  }
  if (weight_->factor.empty()) return;
  for (int64_t i = 0; i < count_; ++i) to[i] *= weight_->factor[k];
}

void RowReader::ReadStored(int64_t k, float* to) {
  const QuantizationScheme& d = weight_->scheme;
  const int64_t group = StoredRow(k) / weight_->group_rows();
  if (group != group_) OpenGroup(group);
  if (d.code == CodeKind::kVector) {
    const int64_t at = StoredRow(k) % kVectorBlock;
    for (int64_t i = 0; i < count_; ++i) to[i] = blocks_[i].Element(at);
    return MultiplyByOuter(to);
  }
  if (d.code == CodeKind::kTrellis) {
    std::copy_n(&trellis_[StoredRow(k) % kTrellisTile * count_], count_, to);
    return MultiplyByOuter(to);
  }
  ReadCodes(k, codes_.data());
  if (d.code == CodeKind::kUnsigned) {
    for (int64_t i = 0; i < count_; ++i) to[i] = static_cast<float>(codes_[i]);
  } else {
    for (int64_t i = 0; i < count_; ++i) to[i] = values_[codes_[i]];
  }
  if (d.zero_kind == ZeroKind::kRealAfter) {
    for (int64_t i = 0; i < count_; ++i) to[i] = to[i] * scales_[i] - zeros_[i];
  } else {
    for (int64_t i = 0; i < count_; ++i) to[i] = (to[i] - zeros_[i]) * scales_[i];
  }
  MultiplyByOuter(to);
}

void RowReader::MultiplyByOuter(float* to) const {
  if (weight_->outer.empty()) return;
  for (int64_t i = 0; i < count_; ++i) to[i] *= weight_->Outer(begin_ + i);
}

std::string Elements::scheme() const {
  return weight_ ? ToString(weight_->scheme) : dense_.tensor.info->dtype;
}

int64_t Elements::Step() const {
  constexpr int64_t kElements = 1 << 20;
  return std::max<int64_t>(8, kElements / k() / 8 * 8);
}

absl::Status Elements::Read(int64_t begin, int64_t end, float* to) const {
  const int64_t columns = end - begin, k = this->k();
  if (weight_ != nullptr) {
    RowReader rows(weight_.get(), begin, end);
    for (int64_t row = 0; row < k; ++row) rows.Read(row, to + row * columns);
    return absl::OkStatus();
  }
  const DType dtype = FloatTypeNamed(dense_.tensor.info->dtype);
  std::vector<uint8_t> bytes(columns * k * SizeOf(dtype));
  AWQD_RETURN_IF_ERROR(ReadPart(dense_.tensor, begin * k * SizeOf(dtype), absl::MakeSpan(bytes)));
  for (int64_t col = 0; col < columns; ++col) {
    for (int64_t row = 0; row < k; ++row) {
      to[row * columns + col] = LoadElement(bytes.data(), dtype, col * k + row);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRoom(absl::string_view what, int64_t rows, int64_t row_bytes) {
  constexpr int64_t kTimes = 3;  // as it is in the file, decoded, and on the way between the two
  const int64_t most = AvailableMemoryBytes() / kTimes;
  if (const auto bytes = CheckedMul(rows, row_bytes); bytes && *bytes <= most) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrCat(what, ": got ", rows, " times ", row_bytes,
                                                   " bytes to hold, expected at most ", most,
                                                   ", a third of the memory that is free"));
}

absl::StatusOr<HostWeight> ReadWeight(const model::Checkpoint& checkpoint,
                                      const model::LinearLocation& linear) {
  AWQD_RETURN_IF_ERROR(CheckRoom(absl::StrCat("weight ", Quoted(linear.path)), 1, linear.bytes));
  std::vector<uint8_t> scratch;
  AWQD_ASSIGN_OR_RETURN(HostWeight weight, checkpoint.Read(linear, &scratch));
  AWQD_RETURN_IF_ERROR(Validate(weight));
  return weight;
}

absl::StatusOr<Elements> ReadElements(const Model& model, absl::string_view path) {
  if (const model::LinearLocation* const linear = model.FindLinear(path); linear != nullptr) {
    AWQD_ASSIGN_OR_RETURN(HostWeight weight, ReadWeight(*model.checkpoint(), *linear));
    return Elements(std::move(weight));
  }
  const std::string name = absl::StrCat(path, ".weight");
  if (model.DensePath(name).empty()) {
    return absl::NotFoundError(absl::StrCat(model.folder().name, ": no linear ", Quoted(path),
                                            ", neither quantised nor dense"));
  }
  const model::TensorLocation& place = *model.tensors().Find(name);
  DenseWeight dense = {.k = place.info->shape[1], .n = place.info->shape[0], .tensor = place};
  AWQD_RETURN_IF_ERROR(CheckRoom(absl::StrCat("weight ", Quoted(path)), kDenseRowsBytes, dense.k));
  AWQD_ASSIGN_OR_RETURN(dense.bias, ReadBias(model, path, dense.n));
  return Elements(std::move(dense));
}

ReadRows RowsOfTensor(const model::TensorLocation& place, int64_t k) {
  return [place, k](int64_t begin, int64_t end, float* to) {
    const DType type = FloatTypeNamed(place.info->dtype);
    const int64_t count = (end - begin) * k, bytes = count * SizeOf(type);
    // The end of the result's own memory.
    uint8_t* const from = reinterpret_cast<uint8_t*>(to + count) - bytes;
    AWQD_RETURN_IF_ERROR(ReadPart(place, begin * k * SizeOf(type), absl::MakeSpan(from, bytes)));
    if (type == DType::kFp32) return absl::OkStatus();
    constexpr int64_t kTogether = 256;  // before the result reaches what is still to be read
    uint16_t halves[kTogether];
    for (int64_t at = 0; at < count; at += kTogether) {
      const int64_t some = std::min(kTogether, count - at);
      std::memcpy(halves, from + at * 2, some * 2);
      float* const out = to + at;
      if (type == DType::kFp16) {
        for (int64_t i = 0; i < some; ++i) out[i] = HalfToFloat(halves[i]);
      } else {
        for (int64_t i = 0; i < some; ++i) out[i] = Bf16ToFloat(halves[i]);
      }
    }
    return absl::OkStatus();
  };
}

DType FloatTypeNamed(absl::string_view dtype) {
  return dtype == "F16" ? DType::kFp16 : dtype == "BF16" ? DType::kBf16 : DType::kFp32;
}

float RoundTo(DType type, float value) {
  if (type == DType::kFp16) return HalfToFloat(FloatToHalf(value));
  return type == DType::kBf16 ? Bf16ToFloat(FloatToBf16(value)) : value;
}

float StoreRounded(float value, DType type, uint8_t* to) {
  const uint16_t bits = type == DType::kFp16 ? FloatToHalf(value) : FloatToBf16(value);
  if (type == DType::kFp32) {
    std::memcpy(to, &value, sizeof(value));
  } else {
    std::memcpy(to, &bits, sizeof(bits));
  }
  return LoadElement(to, type, 0);
}

bool StoreFloats(const float* from, int64_t count, DType type, uint8_t* to) {
  if (type == DType::kFp32) {
    std::memcpy(to, from, count * sizeof(float));
    return true;
  }
  const uint32_t infinity = type == DType::kFp16 ? 0x7c00 : 0x7f80;
  constexpr uint32_t kInfinity = 0x7f800000;
  uint32_t lost = 0;
  const auto store = [&](auto convert) {
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t half = convert(from[i]);
      std::memcpy(to + 2 * i, &half, sizeof(half));
      const bool finite = (std::bit_cast<uint32_t>(from[i]) & kInfinity) != kInfinity;
      lost |= static_cast<uint32_t>(finite & ((half & infinity) == infinity));
    }
  };
  if (type == DType::kFp16) {
    store([](float value) { return FloatToHalf(value); });
  } else {
    store([](float value) { return FloatToBf16(value); });
  }
  return lost == 0;
}

absl::Status RunHalves(int64_t begin, int64_t end, int64_t unit, int64_t least,
                       absl::FunctionRef<absl::Status(int64_t begin, int64_t end)> each) {
  const int64_t middle = begin + (end - begin) / 2 / unit * unit;
  if (middle - begin < least) return each(begin, end);
  std::future<absl::Status> half;
  try {
    half = std::async(std::launch::async, [&] { return each(begin, middle); });
  } catch (const std::system_error&) {  // the process may start no thread
    return each(begin, end);
  }
  const absl::Status status = each(middle, end);
  AWQD_RETURN_IF_ERROR(half.get());
  return status;
}

absl::StatusOr<HostWeight> ReadAhead::Next() {
  if (!next_.valid()) Begin();
  absl::StatusOr<HostWeight> out = next_.get();
  Begin();
  return out;
}

void ReadAhead::Begin() {
  if (begun_ == linears_.size()) return;
  const model::LinearLocation* const linear = linears_[begun_++];
  const auto read = [this, linear] { return ReadWeight(checkpoint_, *linear); };
  try {
    next_ = std::async(std::launch::async, read);
  } catch (const std::system_error&) {  // the process may start no thread: when it is asked for
    next_ = std::async(std::launch::deferred, read);
  }
}

}  // namespace awqd::tools
