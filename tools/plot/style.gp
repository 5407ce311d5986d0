# What the pictures share. The caller sets out, the file to write, in .png or .svg.
if (out[strlen(out) - 3:] eq ".svg") {
    set terminal svg size 1000,360 font "DejaVu Sans,13" background rgb "white" noenhanced
} else {
    if (strstrt(GPVAL_TERMINALS, "pngcairo")) {
        set terminal pngcairo size 1200,560 font "DejaVu Sans,12" noenhanced
    } else {
        set terminal png size 1200,560 noenhanced
    }
}
set output out
set border 3 lc rgb "#606060"
set tics nomirror out scale 0.6
set grid ytics lc rgb "#d8d8d8" lw 1
set style fill solid noborder
array COLOR[6] = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee"]
