# Turns the headers' plain comments into Doxygen's, line by line, so that line numbers stay.
#
#     // What the file is for.        first line        /** @file */ /// …
#     int steps; // how many          after code        int steps; ///< how many
#                // in all            the next lines               ///< in all
#     // What the struct is for.      before code       /// …
#     // ---- values ----             a heading         unchanged

FNR == 1 && /^\/\/ / {
    sub(/^\/\/ /, "/** @file */ /** ")
    opening = 1
    print $0 " */"
    next
}
opening && /^\/\// { print; next }
{ opening = 0 }

/^ *\/\// {
    if (/^ *\/\/ -+/) {
        trailing = 0
    } else if (trailing && /^ /) {
        sub(/\/\//, "///<")
    } else {
        sub(/\/\//, "///")
    }
    print
    next
}
/[;,{] \/\/ / && !/^[^"]*"[^"]*\/\// {
    trailing = sub(/ \/\/ /, " ///< ")
    print
    next
}

# A field that needs no words must not count as a missing comment: only functions, structs and enums
# do.
/^(struct|union) .*\{$/ { fields = 1 }
/^}/ { fields = 0 }
fields && /;$/ { $0 = $0 " ///< &nbsp;" }
{ trailing = 0; print }
