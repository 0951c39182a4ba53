// What a shared libcalib8 shows: what its headers declare between these two, and nothing else of it.
// For a whole header at once, so that nothing of it is forgotten.
#pragma once

#if defined(__GNUC__)  // clang too
#define CALIB8_EXPORT_BEGIN _Pragma("GCC visibility push(default)")
#define CALIB8_EXPORT_END _Pragma("GCC visibility pop")
#else
#define CALIB8_EXPORT_BEGIN
#define CALIB8_EXPORT_END
#endif
