// Raw contents are taken in the order of the inputs that are not in shared memory.
#include "server/wire/oip/tensors.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/wire/oip/parameters.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"

namespace awqd::wire::oip {
namespace {

using inference::InferTensorContents;
using Input = inference::ModelInferRequest::InferInputTensor;

std::string Quoted(absl::string_view text) {
  return absl::StrCat("\"", obs::LogText(text, 64), "\"");
}

std::string FieldOfInput(absl::string_view name) { return absl::StrCat("inputs[", name, "]"); }

// DTYPE_UNSPECIFIED for a name that is none. Protocol Buffers' own search among the names took 0.2
// us of a request's 59 (2026-11-26, AMD EPYC): more than any other function of this protocol.
v1::DType DTypeNamed(absl::string_view name) {
  for (const ElementType& type : kElementTypes) {
    if (v1::DType_Name(type.api) == name) return type.api;
  }
  return v1::DTYPE_UNSPECIFIED;
}

// The members of InferTensorContents: one of them suits an element type, or none does.
struct Member {
  absl::string_view name;
  int values;
};

std::vector<Member> MembersOf(const InferTensorContents& contents) {
  return {{"bool_contents", contents.bool_contents_size()},
          {"int_contents", contents.int_contents_size()},
          {"int64_contents", contents.int64_contents_size()},
          {"uint_contents", contents.uint_contents_size()},
          {"uint64_contents", contents.uint64_contents_size()},
          {"fp32_contents", contents.fp32_contents_size()},
          {"fp64_contents", contents.fp64_contents_size()},
          {"bytes_contents", contents.bytes_contents_size()}};
}

absl::string_view MemberFor(v1::DType dtype) {
  if (dtype == v1::FP32) return "fp32_contents";
  if (dtype == v1::INT8 || dtype == v1::INT32) return "int_contents";
  return dtype == v1::UINT8 ? "uint_contents" : "";
}

absl::Status ReadTyped(const Input& input, v1::Tensor* tensor) {
  const absl::string_view wanted = MemberFor(tensor->dtype());
  const std::string field = absl::StrCat(FieldOfInput(input.name()), ".contents");
  for (const Member& member : MembersOf(input.contents())) {
    if (member.values == 0 || member.name == wanted) continue;
    return FieldError(
        field, absl::StrCat(member.name, " for ", input.datatype()),
        wanted.empty() ? absl::StrCat("raw_input_contents: no contents are of ", input.datatype())
                       : absl::StrCat(wanted, ", or raw_input_contents"));
  }
  const InferTensorContents& contents = input.contents();
  if (wanted == "fp32_contents") {
    *tensor->mutable_floats()->mutable_values() = contents.fp32_contents();
  } else if (wanted == "int_contents") {
    tensor->mutable_ints()->mutable_values()->Add(contents.int_contents().begin(),
                                                  contents.int_contents().end());
  } else if (wanted == "uint_contents") {
    tensor->mutable_ints()->mutable_values()->Add(contents.uint_contents().begin(),
                                                  contents.uint_contents().end());
  }
  return absl::OkStatus();
}

class InputReader {
 public:
  InputReader(inference::ModelInferRequest* request, const WireRanges& raw, Pieces pieces)
      : request_(*request), raw_(raw), pieces_(pieces) {}

  absl::StatusOr<Inputs> ReadInputs(absl::Span<const Slot> slots) {
    AWQD_RETURN_IF_ERROR(CheckSlots(slots));
    for (const Input& input : request_.inputs()) {
      const auto slot =
          absl::c_find_if(slots, [&](const Slot& s) { return s.name == input.name(); });
      AWQD_RETURN_IF_ERROR(ReadInput(input, *slot));
    }
    if (raws_ == 0 || next_raw_ == raws_) return std::move(inputs_);
    return FieldError("raw_input_contents", absl::StrCat(raws_),
                      absl::StrCat(next_raw_, ", one for each input outside shared memory"));
  }

 private:
  // Each input has a slot, and a slot of its own.
  absl::Status CheckSlots(absl::Span<const Slot> slots) const {
    const auto& inputs = request_.inputs();
    for (int i = 0; i < inputs.size(); ++i) {
      const std::string& name = inputs[i].name();
      const auto field = [&] { return absl::StrCat("inputs[", i, "].name"); };
      if (absl::c_none_of(slots, [&](const Slot& slot) { return slot.name == name; })) {
        return FieldError(field(), Quoted(name), NamesOf(slots));
      }
      const auto before = inputs.begin() + i;
      if (std::any_of(inputs.begin(), before,
                      [&](const Input& other) { return other.name() == name; })) {
        return FieldError(field(), absl::StrCat(Quoted(name), " again"), "each input once");
      }
    }
    return absl::OkStatus();
  }

  static std::string NamesOf(absl::Span<const Slot> slots) {
    if (slots.empty()) return "no input";
    return absl::StrJoin(slots, " or ", [](std::string* out, const Slot& slot) {
      absl::StrAppend(out, "\"", slot.name, "\"");
    });
  }

  absl::Status ReadInput(const Input& input, const Slot& slot) {
    v1::Tensor* const tensor = slot.tensor;
    const std::string& datatype = input.datatype();
    const v1::DType dtype = DTypeNamed(datatype);
    if (dtype == v1::DTYPE_UNSPECIFIED) {
      return FieldError(absl::StrCat(FieldOfInput(slot.name), ".datatype"), Quoted(datatype),
                        "FP16, BF16, FP32, INT8, UINT8, INT32 or FP8_E4M3");
    }
    tensor->set_dtype(dtype);
    *tensor->mutable_shape() = input.shape();
    v1::SharedMemory range;
    AWQD_RETURN_IF_ERROR(ReadRegionRange(input.parameters(), FieldOfInput(slot.name), &range));
    if (!range.region().empty()) {
      if (input.has_contents()) return RefuseContents(slot, "shared memory");
      *tensor->mutable_shared_memory() = std::move(range);
      return absl::OkStatus();
    }
    if (raws_ > 0) return ReadRaw(input, slot);
    if (input.has_contents()) {
      inputs_.typed |= slot.payload;
      return ReadTyped(input, tensor);
    }
    if (absl::c_linear_search(input.shape(), 0)) {  // there is nothing to send
      tensor->set_raw("");
      return absl::OkStatus();
    }
    const absl::string_view member = MemberFor(dtype);
    return FieldError(
        absl::StrCat(FieldOfInput(slot.name), ".contents"), "nothing",
        absl::StrCat(member, member.empty() ? "" : ", or ", "an entry of raw_input_contents"));
  }

  absl::Status ReadRaw(const Input& input, const Slot& slot) {
    if (input.has_contents()) return RefuseContents(slot, "raw_input_contents");
    const int i = next_raw_++;
    if (i >= raws_) {
      return FieldError("raw_input_contents", absl::StrCat(raws_),
                        "one for each input outside shared memory");
    }
    std::string* const raw = slot.tensor->mutable_raw();
    if (raw_.empty()) {
      *raw = std::move(*request_.mutable_raw_input_contents(i));
    } else if (slot.payload) {
      inputs_.cut = raw_[i];
    } else {
      raw->resize(raw_[i].size);
      CopyRange(pieces_, raw_[i], raw->data());
      inputs_.copied_bytes += raw_[i].size;
    }
    return absl::OkStatus();
  }

  static absl::Status RefuseContents(const Slot& slot, absl::string_view other) {
    return FieldError(absl::StrCat(FieldOfInput(slot.name), ".contents"), "contents",
                      absl::StrCat("none beside ", other));
  }

  inference::ModelInferRequest& request_;
  const WireRanges& raw_;
  const Pieces pieces_;
  const int raws_ = request_.raw_input_contents_size();
  int next_raw_ = 0;
  Inputs inputs_;
};

}  // namespace

absl::StatusOr<Inputs> TakeInputs(inference::ModelInferRequest* request, const WireRanges& raw,
                                  Pieces pieces, absl::Span<const Slot> slots) {
  return InputReader(request, raw, pieces).ReadInputs(slots);
}

}  // namespace awqd::wire::oip
