// The cases of the bench: weights in enough copies to be cold, and products and decodes that are
// checked before they are timed.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/weight.h"
#include "tests/bench/bench.h"
#include "tests/testing/random_weight.h"

namespace awqd::bench {

// Prints the reason and ends the program with status 1.
[[noreturn]] void Fail(const std::string& why);

void Check(const absl::Status& status);  // fails with it

// The row's name; "libawqd:" before it where the library computes.
std::string NameOf(const Case& spec);

// Uploads bytes to device memory; and downloads device memory.
Buffer Upload(Device& device, const std::vector<uint8_t>& bytes);
std::vector<uint8_t> Download(Device& device, const Buffer& buffer);

// Copies of one random weight.
struct Copies {
  HostWeight canonical;
  std::vector<std::shared_ptr<const DeviceWeight>> weights;
};

// Makes at least two copies, and at least `bytes` altogether. With 0 bytes one weight is used
// several times.
Copies Prepare(const KernelRow& row, const WeightShape& shape, int64_t bytes, Machine& machine,
               bool order = false);

// A product of its own random activations, checked against double when it is created; or a
// dequantize, checked bit for bit.
class Product {
 public:
  Product(const Case& spec, const Copies& copies, Machine& machine);

  // Multiplies by copy `i`, or decodes it.
  void Run(int i, StreamView stream) const;
  double error() const { return error_; }  // relative Frobenius

 private:
  void CheckProduct(const std::vector<uint8_t>& x, const std::vector<uint8_t>& y);
  void CheckDecoded(const std::vector<uint8_t>& decoded) const;

  const Case spec_;
  const Copies& copies_;
  Buffer x_, y_, workspace_;
  double error_ = 0;
};

// Times a case, without floors.
Result Time(const Case& spec, const Copies& copies, Machine& machine);
// Times a case and the same by libawqd, in turns: the least of three each.
std::pair<Result, Result> TimeBesideLibrary(const Case& spec, const Copies& copies,
                                            LibraryWeights& library, Machine& machine);

}  // namespace awqd::bench
