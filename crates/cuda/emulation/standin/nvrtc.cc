// The compiler: the host's, with cuda.h for a GPU.

#include "standin.h"
#include <fstream>
#include <sstream>
#include <unistd.h>

struct Program {
    std::string source, log, image;
};

API Status nvrtcVersion(int *major, int *minor) {
    *major = 12, *minor = 8;
    return 0;
}
API Status nvrtcCreateProgram(Program **program, const char *source, const char *, int headers, const char *const *, const char *const *) {
    if (headers) return 3;
    *program = new Program{source, "", ""};
    return 0;
}
API Status nvrtcDestroyProgram(Program **program) {
    delete *program;
    *program = nullptr;
    return 0;
}
API Status nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    bool architecture = false;
    for (int i = 0; i < count; i++) {
        std::string option = options[i];
        architecture |= option.rfind("--gpu-architecture=sm_", 0) == 0;
        if (option.rfind("--", 0)) return 5;
    }
    if (!architecture) return 5;
    std::ostringstream text;
    text << "#include \"cuda.h\"\n" << program->source << "\n";
    text << "template <class... P> const unsigned long *standin_sizes(void (*)(P...)) {\n"
            "    static const unsigned long all[] = {sizeof(P)..., 0};\n    return all;\n}\n";
    // Kernels are those of KERNEL(name) and KERNEL_BOUNDS(name, ...), once macros that make several are expanded: ask the preprocessor.
    std::string folder = setting("STANDIN_FOLDER", "/tmp");
    size_t hash = std::hash<std::string>()(text.str());
    char stem[64];
    snprintf(stem, sizeof stem, "/kernels-%016zx", hash);
    std::string object = folder + stem + ".so";
    static std::atomic<int> number{0};
    std::string own = folder + stem + "-" + std::to_string(getpid()) + "-" + std::to_string(number++);
    if (access(object.c_str(), R_OK)) {
        std::string source = own + ".cc", listing = own + ".i", log = own + ".log", flags = " -std=c++17 -w -x c++ -I " EMULATION " ";
        std::ofstream(source) << text.str();
        if (system(("c++ -E" + flags + source + " > " + listing + " 2> " + log).c_str()) == 0) {
            std::ifstream expanded(listing);
            std::string all((std::istreambuf_iterator<char>(expanded)), {}), start = "static void kernel_";
            std::ofstream more(source, std::ios::app);
            std::set<std::string> names;
            for (size_t at = all.find(start); at != std::string::npos; at = all.find(start, at + 1)) {
                size_t from = at + start.size();
                names.insert(all.substr(from, all.find('(', from) - from));
            }
            for (const std::string &name : names)
                more << "EMULATION_LAUNCHER(" << name << ")\nextern \"C\" const unsigned long *sizes_" << name
                     << "() { return standin_sizes(kernel_" << name << "); }\n";
        }
        std::string build = "c++ -O2 -fPIC -shared -ffp-contract=off" + flags + source + " -o " + own + ".so 2>> " + log;
        bool built = system(build.c_str()) == 0;
        std::ifstream said(log);
        program->log.assign((std::istreambuf_iterator<char>(said)), {});
        for (auto &path : {source, listing, log}) unlink(path.c_str());
        if (!built || rename((own + ".so").c_str(), object.c_str())) return 6;
    }
    program->image = IMAGE + object;
    return 0;
}
API Status nvrtcGetProgramLogSize(Program *program, size_t *size) {
    *size = program->log.size() + 1;
    return 0;
}
API Status nvrtcGetProgramLog(Program *program, char *log) {
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return 0;
}
API Status nvrtcGetCUBINSize(Program *program, size_t *size) {
    *size = program->image.size() + 1;
    return 0;
}
API Status nvrtcGetCUBIN(Program *program, char *image) {
    memcpy(image, program->image.c_str(), program->image.size() + 1);
    return 0;
}
