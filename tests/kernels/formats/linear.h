// A linear whose tensors own their bytes, so that tests of formats can change one thing at a time.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/formats/format.h"

namespace awqd {

struct Linear {
  struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<uint8_t> bytes;
  };
  const Format* format = nullptr;
  Setting settings;
  std::map<std::string, Tensor> tensors;

  LinearTensors Views() const {
    LinearTensors views;
    for (const auto& [name, tensor] : tensors) {
      views.emplace(name, TensorView{tensor.dtype, tensor.shape, tensor.bytes});
    }
    return views;
  }
  absl::StatusOr<HostWeight> Decode() const { return format->Decode(settings, Views()); }

  void Set(const std::string& name, Setting value) { settings.members[name] = std::move(value); }
  void Set(const std::string& name, int64_t value) { Set(name, Setting::Literal(value)); }

  // Adds a tensor of zeros.
  void Add(const std::string& name, const std::string& dtype, std::vector<int64_t> shape) {
    tensors[name].dtype = dtype;
    Reshape(name, std::move(shape));
  }
  void Reshape(const std::string& name, std::vector<int64_t> shape) {
    Tensor& tensor = tensors[name];
    tensor.shape = std::move(shape);
    int64_t bytes =
        tensor.dtype == "I32" || tensor.dtype == "U32" || tensor.dtype == "F32"           ? 4
        : tensor.dtype == "I64"                                                           ? 8
        : tensor.dtype.starts_with("F8_") || tensor.dtype == "U8" || tensor.dtype == "I8" ? 1
                                                                                          : 2;
    for (int64_t dim : tensor.shape) bytes *= dim;
    tensor.bytes.assign(bytes, 0);
  }
  // Sets element `index` of a tensor whose elements have the size of `value`.
  template <typename T>
  void Put(const std::string& name, int64_t index, T value) {
    std::memcpy(tensors[name].bytes.data() + index * sizeof(T), &value, sizeof(T));
  }
};

// One error in a good linear, and the text of its refusal.
struct Refusal {
  std::string name;
  std::function<void(Linear*)> spoil;
  std::vector<std::string> says;
};
inline void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

inline void ExpectRefused(Linear linear, const Refusal& refusal) {
  ASSERT_TRUE(linear.Decode().ok()) << linear.Decode().status();
  refusal.spoil(&linear);
  const auto weight = linear.Decode();
  EXPECT_EQ(weight.status().code(), absl::StatusCode::kInvalidArgument);
  for (const std::string& text : refusal.says) {
    EXPECT_THAT(std::string(weight.status().message()), ::testing::HasSubstr(text));
  }
}

// Changes for refusals.
inline std::function<void(Linear*)> WithDtype(std::string tensor, std::string dtype) {
  return [=](Linear* l) { l->tensors[tensor].dtype = dtype; };
}
inline std::function<void(Linear*)> WithShape(std::string tensor, std::vector<int64_t> shape) {
  return [=](Linear* l) { l->Reshape(tensor, shape); };
}
inline std::function<void(Linear*)> Without(std::string tensor) {
  return [=](Linear* l) { l->tensors.erase(tensor); };
}
inline std::function<void(Linear*)> Short(std::string tensor) {
  return [=](Linear* l) { l->tensors[tensor].bytes.pop_back(); };
}
inline std::function<void(Linear*)> With(std::string name, Setting value) {
  return [=](Linear* l) { l->Set(name, value); };
}
inline std::function<void(Linear*)> With(std::string name, int64_t value) {
  return With(std::move(name), Setting::Literal(value));
}

}  // namespace awqd
