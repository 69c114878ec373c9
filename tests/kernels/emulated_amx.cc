// Tables of AMX's body over registers in software.
#include "tests/kernels/emulated_amx.h"

#include <cstdlib>

#include "kernels/cpu/bodies/integers/amx_product.h"

namespace awqd::cpu {
namespace {

// AmxRegisters, after the documentation of the instructions. Ends the process where they would
// fault.
class EmulatedAmxRegisters {
 public:
  void Configure(const uint8_t (&rows)[8]) {
    for (int i = 0; i < 8; ++i) {
      Require(rows[i] <= 16);
      registers_[i] = {.rows = rows[i]};
    }
  }
  template <int kRegister>
  void Zero() {
    std::memset(Used(kRegister).bytes, 0, sizeof(Register::bytes));
  }
  // Rows that are not configured become 0.
  template <int kRegister>
  void Load(const void* from, int64_t stride) {
    Zero<kRegister>();
    Register& to = Used(kRegister);
    for (int row = 0; row < to.rows; ++row) {
      std::memcpy(to.bytes[row], static_cast<const char*>(from) + row * stride, 64);
    }
  }
  template <int kRegister>
  void Store(void* to, int64_t stride) {
    const Register& from = Used(kRegister);
    for (int row = 0; row < from.rows; ++row) {
      std::memcpy(static_cast<char*>(to) + row * stride, from.bytes[row], 64);
    }
  }
  template <int kSums, int kX, int kCodes, bool kSigned>
  void AddProducts() {
    static_assert(kSums != kX && kSums != kCodes && kX != kCodes);
    Register& sums = Used(kSums);
    const Register& x = Used(kX);
    const Register& codes = Used(kCodes);
    Require(sums.rows == x.rows && codes.rows == 16);
    for (int row = 0; row < sums.rows; ++row) {
      int32_t lanes[16];
      std::memcpy(lanes, sums.bytes[row], sizeof(lanes));
      for (int quad = 0; quad < 16; ++quad) {
        for (int i = 0; i < 4; ++i) {
          const auto factor = static_cast<int8_t>(x.bytes[row][4 * quad + i]);
          for (int c = 0; c < 16; ++c) {
            const uint8_t byte = codes.bytes[quad][4 * c + i];
            lanes[c] += factor * (kSigned ? static_cast<int8_t>(byte) : byte);
          }
        }
      }
      std::memcpy(sums.bytes[row], lanes, sizeof(lanes));
    }
  }

 private:
  struct Register {
    int rows = 0;
    uint8_t bytes[16][64] = {};
  };

  static void Require(bool condition) {
    if (!condition) std::abort();
  }
  Register& Used(int i) {
    Require(registers_[i].rows > 0);
    return registers_[i];
  }

  Register registers_[8];
};

}  // namespace

const IntegerProduct kEmulatedAmxInt16 = {.prologue = MakeInt16Planes,
                                          .product = AmxInt16Product<EmulatedAmxRegisters>,
                                          .int16 = true,
                                          .token_bytes = kInt16BlockBytes};
const IntegerProduct kEmulatedAmxInt8 = {
    .prologue = OrderInt8,
    .product = AmxInt8Product<EmulatedAmxRegisters,
                              AmxMinTokens{
                                  .tokens = 1, .tokens_of_short_groups = 1, .tokens_of_bytes = 1}>,
    .token_bytes = kBlockRows,
    .group_rows = kRunRows};

}  // namespace awqd::cpu
