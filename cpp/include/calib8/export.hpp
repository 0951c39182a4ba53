// A shared libcalib8 exports the declarations between these two macros and nothing else. They enclose
// a complete header, so that no declaration is forgotten.
#pragma once

#if defined(__GNUC__)  // clang too
#define CALIB8_EXPORT_BEGIN _Pragma("GCC visibility push(default)")
#define CALIB8_EXPORT_END _Pragma("GCC visibility pop")
#else
#define CALIB8_EXPORT_BEGIN
#define CALIB8_EXPORT_END
#endif
