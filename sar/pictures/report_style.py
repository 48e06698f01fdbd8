"""How a report looks: `report.py` puts the colors of both palettes before it, as variables."""

RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink)}
body{font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
header,main{max-width:1180px;margin:0 auto;padding:0 24px}
header{padding-top:32px}
h1{font-size:28px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:20px;margin:40px 0 12px}
p{color:var(--quiet);margin:0 0 8px}
main{padding-bottom:64px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:12px;margin:0}
.tiles div{border:1px solid var(--grid);border-radius:8px;padding:12px 16px}
.tiles div{display:flex;flex-direction:column-reverse;justify-content:flex-end}
.tiles dt{color:var(--quiet);font-size:14px}
.tiles dd{margin:0;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr));gap:16px}
.pictures.wide{grid-template-columns:1fr;overflow-x:auto}
.wide svg{min-width:800px}
figure{margin:0}
svg{display:block;width:100%;height:auto}
.table{overflow-x:auto;margin-top:16px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 24px 6px 0;border-bottom:1px solid var(--grid)}
th,td{vertical-align:top;overflow-wrap:anywhere}
th{color:var(--quiet);font-weight:600;font-size:14px;white-space:nowrap}
.bar{display:flex;width:200px;height:12px;margin-top:6px}
.bar i{height:100%}
.key i{display:inline-block;width:12px;height:12px;margin-left:12px}
.compute{background:var(--first)}
.wait{background:var(--second)}
@media print{section{break-inside:avoid}}
"""
