// The codebooks of vector codes, and eight elements of a block. Everything is constexpr, so that CPU
// and GPU share it. vector_codes.h says what a block is and where these numbers are from.
#pragma once

#include <cstdint>

#include "kernels/base/vector_codes.h"

namespace awqd {

// --- Codebooks ---

// The points, of levels^dimensions, that a codebook has, six of them a character from '#' on without
// the backslash. The number of a point has its first element as the lowest digit. Indices count the
// points that are there.
inline constexpr char kIq2XxsPoints[] =
    "88$(8$$4$('#'3$4##$####$#$#(##'#####'###3$$3$($#$3$$#$($#$#'##3$3###3$##$####$##$4$$#4$(###$"
    "###$###$########'#$##########3$$3#$##$#$4##$$#$##$'#$#######$3########$$#4#3###$######$####'"
    "#####$#'##########3$$##$###3####4###########$######3#######('###$#3#(#######3#$#######(#####"
    "#######3$$##$#'######$###3###$###############$###$#$#######$####################$#######3$$4"
    "$$$'$3$$##$##$###3#4###3#$###$'#$####$$#$#####$#3###'#$#########$############3$$##4########$"
    "######4#'########3#####$##$43$#####$$###$###'#######$##########3#############(###'##########"
    "#3######$######$33#####$#########$#########$############$$##$###$####$#####3#########$####$#"
    "####4##############(#######$#####################'###################################('##3##"
    "##'####$#$#$#########3###########3$4##$##$#####$####'#####$##3###$##$#####'#############$###"
    "##########3############$$#$$######3###'######$########3########$##'#$#############3#########"
    "####################3#######$#######################'#####$##3####3############$############"
    "###$###########################################$#######$##########################";
inline constexpr char kIq2XsPoints[] =
    "88884884$844$3888$84$$4$$##84$$3$4##$'##3884$84($3$$##84$$3$$3#$###3$$#'(####$###88$43$$$#$#"
    "#$7$$##$###33###$##$$######'$3884$84$$7$$##84$$3$$##$#(#3($##$##$#####84$$34$#$$###3$$##$###"
    "#####$#$##3#######3$(##$#$##'###4#######'##########3######388$$3$$##$##$3$$##$$#3#####$##'##"
    "###$###4$$#3$########$###3#'####3#3##'#########'$(#$##3###$#'#########$#$###$#$#####'(##3884"
    "$88$43$$##84$$3$$##4##'3$(#3$########844$3$$##$#$#3$$#$$######'#$'###$$######3$$##4#$'#####$"
    "3###$$#3#####$############84$$4$$##$###3$4##(########$####$#######7$$3#$##$3##3#$$#######$$#"
    "####3#####$##3#$#$#3#$####3####'#(#################3###3$$##$#$'#'##3$################$#'###"
    "#'##$#'############$##4#######$#############3########'#######3##########'#####$'#####84$$7$$"
    "##(###8($##$33######$##$#####(##$4$8##$##$#3###$####$######3###$#####'####$$#3###'#(###$'###"
    "############'#####$$'#4$$##$#'##$###$##'####$###########'##3###4####$$$#########3######(####"
    "##3##############3######'#####3#########3#####$#####((#$'#######$######33#####'($##'####$##$"
    "#####$#####3#######################3###$##'#($#######$$$########(#######(#####3##'";
inline constexpr char kIq2SPoints[] =
    "88884884884$47884$84844$83$84$$784##4'$'3884888883844$88844884$84$$384##44$$3$$##84847884$4#"
    "$#7$84#44$$3#$##$3$'(#$####3#3884(84884(44$88884884$84$#3443$43$#3$$##84844884$84$$3884$84$$"
    "3$$##44$$3$$##$###7844#84$$3$###84$$3$$#3###'#$$##$#'######84847$8#$$'$#7$83#83$$3$$##$'#'($"
    "$###(##4844$84$$3$$##44$$3$$#'$###3$$##$#3######43$#3$$###'##7$$########3###'#'####$#(##3888"
    "(88883$44$84883884$84$$3$8$$44$$3$###88884884$84$$3884$84$$7$$##84$$3$$##$##33484$84$$#$$##8"
    "4$$3$$##$#'#3$$##$########84884884$84$#3884$84$$3$$##44$$3$$#3$###3884$84$$3$$##84$$3$$##$##"
    "#3$$#'$########84$$3$$'#$###3$$##$########$#3######3###4(84$44$$#$$##84$$3$$##$#3##$$##$#'##"
    "##3#44$$3$$##$###3$$##$'##$#'##$##########$#3$$#####3###$#$###'#############'######3#84443$8"
    "4#43$#3484$84$#3$$#347$#3$$######3884#84$$3$$##84$$3$$##$'##3$$#3$########43$#3$$#####'3$###"
    "$##3########'###(#'##'348$$84$$3$$##43$#3$$'#####3$$##$#######'84$$3$$##$#'#3$$##$######4#$#"
    "###'##$####3$$#'$#######3$####3'#################$##4'$'7$$#####''####$##3#####''#'(####'(##"
    "4$$##$####3##$$#3################3########'##$#######'#######$##'####(#($#####$##'";
inline constexpr char kIq3XxsPoints[] =
    "8K;$%3###CE%(+5$%#$#$7D#(K+#%%#+%9#+#####'##+##C3#+#K++##3##'#######C###3###4$##+#C##K3$-7$C"
    "$###(+3$######C%(+3#####'7##$+#3##'#E#####3######'$##$##%#%############$#'####3$-7G#'####K5$"
    "%'###C;#(+;$#)#+##C#4#######4#####%#+###+##C#+####$##########K#3###+####%7C%##3#C33$#'C#3$##"
    "#K3#C###'##$#+##+#########3##%##'''#'###C#####$##$##+######%##3###$C##-#+%############$##'#C"
    "$#33##+####+####3#####C#3#####%#+###$###########C7##$#######'###%###$''##$##C#####$#'####3#$"
    "#####C####3#+%#####$'###%############'######3##$#######'##(#3####+####C####C######$#####$$##"
    "########3#####%#####'#######+######%#+#######C=##3##'######3#'######'###C3###'#+#C###'####C#"
    "#+####3$##$##########'#################";
inline constexpr char kIq3SPoints[] =
    "JAX++7M%(+](FGK+3#C+'/=5E'$L-#3%++5$-$4$#-5#+-$$,+##$3$#(DCK##'%#L##%##$#+3(#7'%#'$##?TM(+(#"
    "3,#$.(D#,+3$#'7#G)$$,#5#'+<%%)D##33#K3$#-37'##C#,+3$#+######4%#7####-7C#C+##''SM8L;$M7#CL73E"
    "G+$$%###5%C%$-#E#+4,%3D%''#3#++#,3E####,3+#$#)#%#'3D#+####E###E##(#%$###'K-$M3L#++C-3K##$#3#"
    "'(#$$3$#$###%'DE$K++#C#%%4C##33'#+3$C3#'#$#%##'##+####C%#7#+#####'$$45C#$#3#'M#$DCC+##C%D+#%"
    "$#+$$#D%(+%#####(##'#)###+#K#+#####$###%##$##'###'%#$CC####$43##45#33K%$%3#####$$+#%$$#%###D"
    "$#+#3+#+++$#$3#3#####3#3##C%########'####3$#'########K%#-###$#3##'+####'###$##$$C33#$#D##'##"
    "######%#+##$#G####$##'##C####'######-########',#(#7#33##'+#'#C%###C'$,3##+###3###3%#+###EC3#"
    "##3######3##'####3###+######$##########";
inline constexpr char kIq1Points[] =
    "88%((%M#%((%((&M)%EEEM$%M#%((%((%%%4(85((#M#%%%E;##%%%^#M#-E_MM%3M^%#+%#-K-F%%-%#((%((%E#%(("
    "%((%-%&%;%-%#M%%((%((%%5%8(%((#.%&-+-=%#M3%MM--%Ec-%+C%-##M#%DEMK#%M#%E%>E3Q^E-+-_=EE^MM^SZ^"
    "MN_Q%^#QEKNU6_CG%+%#E#%M-MN%%-#%#KE5C.^1E#U-E%3C#(KM-E%%E'#((%8(%%5%((%8(%-%%/%M^#%D%%%8%((%"
    "E%%%8%((%K%%[EMC#%-5%#%%%--=E-#-NM%%(%%%%%&%($'#((%((%-#%((#((3-%%CE%M%%D%&((#((%E%%((%((%E#"
    "%#EMM##+5'NEQE%M^)MMK%*#%M#%%CE+%3+#%%#5#%M^SMEM%&UE^-E^=B^E.^)M5%N-M-ZE-5'&M#%5'%'--M%%M%%U"
    "/.M+EbMICE1M%#C##K%M+%#+#%^EE---^%-C%-F%^^.Q^^c^E%^-EECE-CE^E%3KU+#&^6M^Acb-K^5Fb^Z^^BcBc=AB"
    "^^@=_BUcc=Eb5GA[--%'M^N&'M-%UE^%%^^c^55^&%+$ET%=UFM%GQ%#%K%%++QM5#C#%ME%I%5U%I+G%E%#E%#F#1$#"
    "%E#%#SIEMM^Q%;MR-%MU%#[=:^%WUI1'%%D.M^0-8'@L'#C%%%CE%%%%$'-+%M=1^-E/'%=%#E$#--M;%'+('((#((%N"
    "%%((%((%M%%-MAK%5K%%((%((#-%%((%((#+%#-3E-%#+%#%EEC=-^)QMM-C##E%%-1UE'%%'$((%(8%-%5((%(()M#%"
    "MME-#%C%%((%((%M##((%((%E&%E%M#)%M%%M-MM-%_E%KC-M%%-%%KM-C%%K#3M+-C+C^_%KC.%-M_5U^^c^5-bQM-+"
    "5D%=Y%-/I&K%%C%%EKI;#%E%%KMMNKM^EI-KEE#%3#%K--%#%^##((%((%M%#((%((5M)#C5M-#%H%#'03'(%E%%((%("
    "(##%%-+NU&%###CM-CE%^%E^E-##%E7%KG1(#'T5(((#((#M%#((%((%+5%%+EE%#D##((#((#M##((%((";

// Points as unsigned bytes, the first element lowest; of iq1 they are 8 * element + 9.
template <typename Word, int kPoints>
struct Codebook {
  Word points[kPoints] = {};
};

// `values`: of the digits of a point.
template <typename Word, int kPoints, int kLevels>
constexpr Codebook<Word, kPoints> ExpandCodebook(const char* points,
                                                 const uint8_t (&values)[kLevels]) {
  Codebook<Word, kPoints> out;
  for (int number = 0, index = 0; index < kPoints; ++number) {
    const char six = points[number / 6];
    if (((six - '#' - (six > '\\' ? 1 : 0)) >> (number % 6) & 1) == 0) continue;
    Word point = 0;
    for (int i = 0, digits = number; i < static_cast<int>(sizeof(Word)); ++i, digits /= kLevels) {
      point |= static_cast<Word>(values[digits % kLevels]) << (8 * i);
    }
    out.points[index++] = point;
  }
  return out;
}

inline constexpr uint8_t kIq2Values[] = {8, 25, 43};
inline constexpr uint8_t kIq3XxsValues[] = {4, 12, 20, 28, 36, 44, 52, 62};
inline constexpr uint8_t kIq3SValues[] = {1, 3, 5, 7, 9, 11, 13, 15};
inline constexpr uint8_t kIq1Values[] = {1, 9, 17};

template <VectorCode kCode>
constexpr auto MakeCodebook() {
  if constexpr (kCode == VectorCode::kIq2Xxs) {
    return ExpandCodebook<uint64_t, 256>(kIq2XxsPoints, kIq2Values);
  } else if constexpr (kCode == VectorCode::kIq2Xs) {
    return ExpandCodebook<uint64_t, 512>(kIq2XsPoints, kIq2Values);
  } else if constexpr (kCode == VectorCode::kIq2S) {
    return ExpandCodebook<uint64_t, 1024>(kIq2SPoints, kIq2Values);
  } else if constexpr (kCode == VectorCode::kIq3Xxs) {
    return ExpandCodebook<uint32_t, 256>(kIq3XxsPoints, kIq3XxsValues);
  } else if constexpr (kCode == VectorCode::kIq3S) {
    return ExpandCodebook<uint32_t, 512>(kIq3SPoints, kIq3SValues);
  } else {
    return ExpandCodebook<uint64_t, 2048>(kIq1Points, kIq1Values);
  }
}

// --- A block ---

// Eight elements over their scale, as signed bytes: elements 0 to 3, the first lowest, and 4 to 7.
struct EightElements {
  uint32_t low = 0, high = 0;
};

namespace vector_codes {

constexpr int Two(const uint8_t* from) { return from[0] | from[1] << 8; }
constexpr int Nibble(const uint8_t* from, int index) {
  return from[index / 2] >> (index % 2 * 4) & 15;
}

// Bytes, none of them 0, with the other sign where `signs` has a bit, the lowest of the first.
constexpr uint32_t WithSigns(uint32_t bytes, int signs) {
  const uint32_t minus = (static_cast<uint32_t>(signs & 15) * 0x00204081u) & 0x01010101u;
  return (bytes ^ minus * 0xffu) + minus;
}
constexpr EightElements WithSigns(uint32_t low, uint32_t high, int signs) {
  return {WithSigns(low, signs), WithSigns(high, signs >> 4)};
}

// Seven signs and the eighth, which makes their number even.
constexpr int EvenSigns(int seven) {
  int parity = seven ^ seven >> 4;
  parity ^= parity >> 2;
  return seven | ((parity ^ parity >> 1) & 1) << 7;
}

// 8 * (point + offset) of bytes 8 * point + 9: less 8 or less 10.
constexpr uint32_t WithOffset(uint32_t bytes, bool minus) {
  return ((bytes | 0x80808080u) - (minus ? 0x0a0a0a0au : 0x08080808u)) ^ 0x80808080u;
}

}  // namespace vector_codes

// Elements 8 v to 8 v + 7 of a block, without their scale.
template <VectorCode kCode, typename Book>
constexpr EightElements DecodeEight(const Book& book, const uint8_t* block, int v) {
  using namespace vector_codes;
  const auto two = [&](uint64_t point, int signs) {
    return WithSigns(static_cast<uint32_t>(point), static_cast<uint32_t>(point >> 32), signs);
  };
  const auto one = [&](uint64_t point, bool minus) {
    return EightElements{WithOffset(static_cast<uint32_t>(point), minus),
                         WithOffset(static_cast<uint32_t>(point >> 32), minus)};
  };
  if constexpr (kCode == VectorCode::kIq2Xxs) {
    const uint8_t* const group = block + 2 + v / 4 * 8;
    const int signs = (Two(group + 4) | Two(group + 6) << 16) >> (v % 4 * 7) & 127;
    return two(book.points[group[v % 4]], EvenSigns(signs));
  } else if constexpr (kCode == VectorCode::kIq2Xs) {
    const int code = Two(block + 2 + 2 * v);
    return two(book.points[code & 511], EvenSigns(code >> 9));
  } else if constexpr (kCode == VectorCode::kIq2S) {
    const int index = block[2 + v] | (block[66 + v / 4] >> (v % 4 * 2) & 3) << 8;
    return two(book.points[index], block[34 + v]);
  } else if constexpr (kCode == VectorCode::kIq3Xxs) {
    const uint8_t* const group = block + 66 + v / 4 * 4;
    const int signs = (Two(group) | Two(group + 2) << 16) >> (v % 4 * 7) & 127;
    return WithSigns(book.points[block[2 + 2 * v]], book.points[block[3 + 2 * v]],
                     EvenSigns(signs));
  } else if constexpr (kCode == VectorCode::kIq3S) {
    const int upper = block[66 + v / 4] >> (v % 4 * 2);
    return WithSigns(book.points[block[2 + 2 * v] | (upper & 1) << 8],
                     book.points[block[3 + 2 * v] | (upper & 2) << 7], block[74 + v]);
  } else if constexpr (kCode == VectorCode::kIq1S) {
    const int group = Two(block + 34 + v / 4 * 2);
    return one(book.points[block[2 + v] | (group >> (v % 4 * 3) & 7) << 8], group >> 15 != 0);
  } else {
    const int upper = Nibble(block + 32, v);
    return one(book.points[block[v] | (upper & 7) << 8], upper >= 8);
  }
}

// The FP16 bits of a block's d.
template <VectorCode kCode>
constexpr uint16_t BlockScale(const uint8_t* block) {
  if constexpr (kCode != VectorCode::kIq1M) return static_cast<uint16_t>(vector_codes::Two(block));
  int d = 0;
  for (int i = 0; i < 4; ++i) d |= block[49 + 2 * i] >> 4 << (4 * i);
  return static_cast<uint16_t>(d);
}

// The scale of elements 16 i to 16 i + 15 as DecodeEight returns them. `d`: that of the block.
template <VectorCode kCode>
constexpr float ScaleOfSixteen(const uint8_t* block, float d, int i) {
  using namespace vector_codes;
  const auto odd = [](int s) { return static_cast<float>(2 * s + 1); };
  if constexpr (kCode == VectorCode::kIq2Xxs) return d * odd(block[9 + i / 2 * 8] >> 4) / 8;
  if constexpr (kCode == VectorCode::kIq2Xs) return d * odd(Nibble(block + 66, i)) / 8;
  if constexpr (kCode == VectorCode::kIq2S) return d * odd(Nibble(block + 74, i)) / 8;
  if constexpr (kCode == VectorCode::kIq3Xxs) return d * odd(block[69 + i / 2 * 4] >> 4) / 4;
  if constexpr (kCode == VectorCode::kIq3S) return d * odd(Nibble(block + 106, i / 2));
  if constexpr (kCode == VectorCode::kIq1S) return d * odd(block[35 + i / 2 * 2] >> 4 & 7) / 8;
  return d * odd(Two(block + 48 + i / 4 * 2) >> (i % 4 * 3) & 7) / 8;
}

}  // namespace awqd
