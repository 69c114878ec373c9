// The body for AMX, which multiplies many tokens; fewer are left to AVX-512 VNNI.
#include "kernels/cpu/bodies/integers/amx_product.h"

namespace awqd::cpu {
namespace {

// AMX's tile registers: eight of 16 rows of 64 bytes, and the instruction that multiplies two of
// them. Tests have the same in software. Written in assembly: GCC's intrinsics want the digit of a
// register where a template has a number, and do not say that a load reads memory.
//
// A thread holds them while it multiplies: until they are released each switch between threads
// saves 8 KiB more.
class AmxRegisters {
 public:
  AmxRegisters() = default;
  AmxRegisters(const AmxRegisters&) = delete;
  AmxRegisters& operator=(const AmxRegisters&) = delete;
  ~AmxRegisters() { asm volatile("tilerelease"); }

  // How many rows each register has from now on, at most 16. One of 0 must not be used. What they
  // held is lost.
  void Configure(const uint8_t (&rows)[8]) {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof(config) == 64);
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = rows[i] == 0 ? 0 : 64;
    std::memcpy(config.rows, rows, sizeof(rows));
    asm volatile("ldtilecfg %0" ::"m"(config));
  }

  template <int kRegister>
  AWQD_ALWAYS_INLINE void Zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
  }
  // Rows `stride` bytes apart.
  template <int kRegister>
  AWQD_ALWAYS_INLINE void Load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kRegister)
                 : "memory");
  }
  template <int kRegister>
  AWQD_ALWAYS_INLINE void Store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kRegister)
                 : "memory");
  }
  // sums[r][c] += the products of x's four bytes i of row r, which are signed, and codes' four
  // bytes c of row i, for all of the 16 i.
  template <int kSums, int kX, int kCodes, bool kSigned>
  AWQD_ALWAYS_INLINE void AddProducts() {
    if constexpr (kSigned) {
      asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX), "i"(kCodes));
    } else {
      asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX), "i"(kCodes));
    }
  }
};

}  // namespace

// The least tokens are those from which on AMX is faster, on one core and on 16 (README.md).
const IntegerProduct kAmxInt16 = {.prologue = MakeInt16Planes,
                                  .product = AmxInt16Product<AmxRegisters>,
                                  .int16 = true,
                                  .token_bytes = kInt16BlockBytes,
                                  .min_tokens = 6,
                                  .min_tokens_8bit = 8};
constexpr AmxMinTokens kMin = {.tokens = 7, .tokens_of_short_groups = 16, .tokens_of_bytes = 24};
const IntegerProduct kAmxInt8 = {.prologue = OrderInt8,
                                 .product = AmxInt8Product<AmxRegisters, kMin>,
                                 .token_bytes = kBlockRows,
                                 .group_rows = kRunRows};

}  // namespace awqd::cpu
